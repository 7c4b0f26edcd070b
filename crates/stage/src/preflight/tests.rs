use host::port::Holder;

use super::*;

const GIB: u64 = 1 << 30;

fn order() -> PreflightOrder {
    PreflightOrder { prefix: None, endpoint: ([10, 0, 0, 1], 8050).into(), need_bytes: GIB }
}

fn with(available: u64) -> Room {
    Room { available, total: 100 * GIB, files: None }
}

fn good_place(prefix: &str) -> Place {
    Place { room: with(50 * GIB), ..Place::of(prefix.into()) }
}

fn good() -> Observed {
    Observed {
        claimed: None,
        places: vec![good_place("/opt/flux-distribute"), good_place("/var/lib/flux-distribute")],
        port: PortUse::Free,
        machine: "x86_64".into(),
        glibc: Some("2.36".into()),
        musl: false,
        systemd: true,
        cgroup_writable: true,
        memlock: true,
        resources: Resources { cores: 4, gpus: 0 },
        static_cpus: false,
        memory_mib: 1024,
        boot_id: "b".into(),
    }
}

fn broken(place: &str) -> Place {
    Place { trouble: Some("mounted read-only".into()), ..good_place(place) }
}

#[test]
fn a_good_host_gets_the_first_suitable_place() {
    let full = Place { room: with(10 * GIB + GIB / 2), ..good_place("/opt/flux-distribute") };
    for (what, places, expected) in [
        ("the first", good().places, "/opt/flux-distribute"),
        ("read-only /opt", vec![broken("/opt/x"), good_place("/var/lib/y")], "/var/lib/y"),
        ("full /opt", vec![full, good_place("/var/lib/y")], "/var/lib/y"),
    ] {
        let found = assess(Observed { places, ..good() }, &order()).unwrap();
        assert_eq!(found.prefix, PathBuf::from(expected), "{what}");
        assert!(found.warnings.is_empty(), "{what}");
    }
}

#[test]
fn each_refusal_names_the_object_and_a_remedy() {
    let full = Place { room: with(10 * GIB), ..good_place("/opt/flux-distribute") };
    let cgroupless = Observed { systemd: false, cgroup_writable: false, ..good() };
    for (seen, words, transient) in [
        (Observed { machine: "riscv64".into(), ..good() }, ["riscv64", "spec.nodes.selector"], false),
        (Observed { glibc: None, musl: true, ..good() }, ["musl", "spec.nodes.selector"], false),
        (cgroupless, ["/sys/fs/cgroup", "privileged"], false),
        (Observed { resources: Resources::default(), ..good() }, ["core", "/sys"], false),
        (Observed { places: vec![broken("/opt/x")], ..good() }, ["/opt/x: mounted read-only", "spec.prefix"], false),
        (Observed { places: vec![full], ..good() }, ["10240 MiB are free", "11264 MiB are needed"], true),
        (
            Observed { port: PortUse::Taken(Holder::Process(7, "sshd".into())), ..good() },
            ["sshd (pid 7)", "spec.broker.port"],
            true,
        ),
        (Observed { port: PortUse::Taken(Holder::Unknown), ..good() }, ["port 8050", "spec.broker.port"], true),
    ] {
        let refusal = assess(seen, &order()).unwrap_err();
        assert!(words.iter().all(|word| refusal.message.contains(word)), "{words:?}: {refusal}");
        assert_eq!(refusal.transient, transient, "{refusal}");
    }
}

#[test]
fn our_own_broker_may_have_the_port() {
    assert!(assess(Observed { port: PortUse::Ours, ..good() }, &order()).is_ok());
}

#[test]
fn an_installed_host_needs_no_more_room() {
    let places = vec![Place { room: with(0), ..good_place("/opt/flux-distribute") }];
    assert!(assess(Observed { places, ..good() }, &PreflightOrder { need_bytes: 0, ..order() }).is_ok());
}

#[test]
fn a_claimed_host_keeps_its_place_and_warns_about_it() {
    let wanted = PreflightOrder { prefix: Some("/data/flux".into()), ..order() };
    let claimed = PathBuf::from("/opt/flux-distribute");
    assert_eq!(candidates(Some(&claimed), &wanted), std::slice::from_ref(&claimed));
    assert_eq!(candidates(None, &wanted), [PathBuf::from("/data/flux")]);
    let seen = Observed { places: vec![good_place("/opt/flux-distribute")], claimed: Some(claimed.clone()), ..good() };
    let found = assess(seen, &wanted).unwrap();
    assert_eq!(found.prefix, claimed);
    assert!(found.warnings[0].contains("/data/flux"), "{:?}", found.warnings);
}

#[test]
fn a_host_without_systemd_is_accepted() {
    let found = assess(Observed { systemd: false, memlock: false, ..good() }, &order()).unwrap();
    assert!(!found.systemd && found.warnings.len() == 1);
}

#[test]
fn a_shared_file_system_is_refused_unless_the_host_is_claimed_there() {
    let words = "/shared/flux is on NFS, which nodes share";
    let refused = Place { trouble: Some(words.into()), ..good_place("/shared/flux") };
    let refusal = assess(Observed { places: vec![refused], ..good() }, &order()).unwrap_err();
    assert!(refusal.message.contains(words) && refusal.message.contains("spec.prefix"), "{refusal}");
    let claimed = Place { warning: Some(words.into()), ..good_place("/shared/flux") };
    let seen = Observed { claimed: Some("/shared/flux".into()), places: vec![claimed], ..good() };
    assert_eq!(assess(seen, &order()).unwrap().warnings, [words]);
}
