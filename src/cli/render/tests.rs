use super::*;

fn rendered(list: &str, spec: &str, what: What) -> Result<String, String> {
    let spec = if spec.is_empty() { FluxInstanceSpec::default() } else { read_instance(spec).unwrap() };
    let hosts = hostlist::parse(list).unwrap();
    let nodes = GivenNodes::invent(&hosts, "10.0.0.1".parse().unwrap()).unwrap();
    let preview = preview(&spec, &nodes, AssumedResources { cores: Some(8), gpus: 1 }).unwrap();
    text(&preview, &spec, what)
}

/// Without the comments at its top.
fn content(text: &str) -> String {
    text.lines().skip_while(|line| line.starts_with("# ")).map(|line| format!("{line}\n")).collect()
}

fn node(name: &str) -> What {
    What::Node { node: name.to_owned() }
}

#[test]
fn the_steps_on_a_follower_name_every_file_and_port() {
    let text = rendered("n[1-3]", "", node("n3")).unwrap();
    let expected = "\
node n3: rank 2, broker n3, a follower, child of rank 0 (n1); declares cores 0-7 and 1 GPUs

preflight  looks at the host, and changes nothing: glibc, systemd or a writable cgroup, room at the prefix, a free port
claim      makes /opt/flux-distribute, and in it the undo list state.json and the file lock
install    fetches the packages to /opt/flux-distribute/pkgs, and links them to /opt/flux-distribute/envs/DIGEST
configure  raises fs.inotify.max_user_instances to 8192, if it is lower
           raises fs.inotify.max_user_watches to 524288, if it is lower
           writes /opt/flux-distribute/etc/broker.toml: mode 0644, owner root
           writes /opt/flux-distribute/etc/curve.cert: mode 0600, owner root
           writes /opt/flux-distribute/etc/roster.json: mode 0644, owner root
           writes /opt/flux-distribute/bin/flux-connect.sh: mode 0755, owner root
           writes /opt/flux-distribute/current: a symlink to the environment
           writes /flux-connect.sh: the same script for people, if the root directory can be written
start      once the lead has loaded the resources of this rank, and the broker of its parent is online
           with systemd: starts flux-broker.service in flux.slice, from /run/systemd/system/flux-broker.service and /run/systemd/system/flux.slice.d/50-flux-distribute.conf
           without: starts the broker in cgroups of its own, outside of the pod's
           writes /opt/flux-distribute/log/broker.log: the broker's log
           writes /opt/flux-distribute/run: the broker's rundir, with the temporary directories of jobs
online     waits until the broker answers at local:///run/flux-distribute/broker/local, and is in state run
ports      the broker connects to 10.0.0.1:8050 (n1)
           TCP 10.0.0.3:8051: the agent's metrics, for clients that the API server permits
           TCP 10.0.0.3:8052: the agent serves packages to other nodes
mounts     none
at the end removes all of it, and /run/flux-distribute; state.json lists what to undo
";
    assert_eq!(content(&text), expected);
}

#[test]
fn the_lead_listens_and_keeps_the_queue() {
    let text = rendered("n[1-3]", "broker: {port: 9000, runAs: flux}\nprefix: /srv/flux\n", node("n1")).unwrap();
    for line in [
        "node n1: rank 0, broker n1, the lead; declares cores 0-7",
        "           writes /srv/flux/etc/curve.cert: mode 0600, owner flux",
        "           writes /srv/flux/etc/live.json: mode 0644, owner root",
        "           writes /srv/flux/state: the queue, owner flux; it outlives the broker",
        "           writes prefix.json, which names that directory, to the first that it can of /opt/flux-distribute, ",
        "start      as soon as it is configured",
        "           writes /srv/flux/etc/applied.json: which revision",
        "ports      TCP 10.0.0.1:9000: the broker listens for its children",
    ] {
        assert!(text.lines().any(|found| found.starts_with(line)), "{line} is not in:\n{text}");
    }
}

#[test]
fn on_a_node_without_a_rank_there_is_little_to_do() {
    let text = rendered("n[1-3]", "size: 2\n", node("n3")).unwrap();
    let steps: Vec<String> = content(&text).lines().map(|line| line.split("  ").next().unwrap().to_owned()).collect();
    assert_eq!(steps, ["node n3: no rank: size is 2", "", "preflight", "claim", "install"]);
    let missing = rendered("n[1-3]", "", node("n4"));
    assert_eq!(missing, Err("there is no node \"n4\" among the given ones".to_owned()));
    let unit = rendered("n[1-3]", "size: 2\n", What::Unit { node: Some("n3".to_owned()) });
    assert_eq!(unit, Err("node n3 gets no rank, so no broker runs there: size is 2".to_owned()));
}

#[test]
fn a_unit_says_what_only_the_host_knows() {
    let unit = |run_as: &str| {
        rendered("n[1-3]", &format!("broker: {{runAs: {run_as}}}\n"), What::Unit { node: None }).unwrap()
    };
    let root = unit("root");
    assert!(root.contains("ExecStart=/opt/flux-distribute/envs/DIGEST/bin/flux broker ") && !root.contains("User="));
    assert!(root.contains("-Sstatedir=") && root.contains("# systemd runs on the host"), "{root}");
    let named = unit("flux");
    assert!(named.contains("\nUser=UID\n") && named.contains("# UID stands for the number"), "{named}");
    let numbered = unit("'1000'");
    assert!(numbered.contains("\nUser=1000\n") && numbered.contains("/etc/passwd has user 1000; if not"), "{numbered}");
}

#[test]
fn a_tree_has_its_comments_in_the_words_of_its_format() {
    let tree = |output| rendered("n[1-7]", "topology: kary:2\n", What::Tree { output }).unwrap();
    let text = tree(TreeFormat::Text);
    let expected = "0 n1 8 cores, 1 GPU\n  1 n2 8 cores, 1 GPU\n    3-4 n[4-5] 8 cores, 1 GPU\n  2 n3 8 cores, 1 GPU\n    \
                    5-6 n[6-7] 8 cores, 1 GPU\n";
    assert_eq!(content(&text), expected);
    assert!(text.starts_with("# assumed: ") && tree(TreeFormat::Dot).starts_with("// assumed: "));
    let svg = tree(TreeFormat::Svg);
    assert!(svg.starts_with("<!-- assumed: ") && svg.ends_with("</svg>\n"), "{svg}");
    for comment in svg.split("<!--").skip(1) {
        assert_eq!(comment.split_once("-->").unwrap().0.matches("--").count(), 0, "{comment}");
    }
}
