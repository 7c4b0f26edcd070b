use super::*;

/// The findings of a file's only FluxInstance, as `LINE: finding`.
fn found(text: &str) -> Vec<String> {
    let told =
        |finding: &Finding| format!("{}: {finding}", finding.line.map_or("?".to_owned(), |line| line.to_string()));
    match read(text) {
        Ok(documents) => documents.specs.iter().flat_map(|document| &document.findings).map(told).collect(),
        Err(finding) => vec![told(&finding)],
    }
}

const HEAD: &str = "apiVersion: distribute.flux-framework.org/v1alpha1\nkind: FluxInstance\nmetadata: {name: flux, namespace: flux-distribute}\n";

#[test]
fn all_problems_are_found_at_once_with_their_lines() {
    let text = format!(
        "{HEAD}spec:
  sise: 3
  size: many
  lead: Bad Name
  topology: kary:0
  packages:
    glibc: two
    specs:
    - flux-core
    - flux-core ===
  broker:
    cpuWeight: 0
  nodes:
    selector: {{pool: hpc}}
    tolerations:
    - key: hpc
      operator: Equals
"
    );
    let found = found(&text);
    let expected = [
        "5: spec.sise: there is no such field: did you mean size?",
        "6: spec.size: must be of type integer, not string",
        "7: spec.lead: \"Bad Name\" is not a node name",
        "8: spec.topology: \"kary:0\" is Flux's name for a flat tree: write flat",
        "10: spec.packages.glibc: \"two\" is not a version such as 2.28",
        "13: spec.packages.specs[1]: ",
        "15: spec.broker.cpuWeight: 0 is less than 1",
        "17: spec.nodes.selector.pool: there is no such field: write pool below matchLabels",
        "20: spec.nodes.tolerations[0].operator: \"Equals\" is none of \"Equal\", \"Exists\"",
    ];
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(expected), "{found}, not {expected}");
    }
}

#[test]
fn only_the_served_name_namespace_and_version_are_valid() {
    let served = "only FluxInstance flux in namespace flux-distribute is: write";
    for (text, expected) in [
        (
            HEAD.replace("v1alpha1", "v1"),
            "1: apiVersion: \"distribute.flux-framework.org/v1\" is not served: write ".to_owned(),
        ),
        (
            HEAD.replace("distribute.flux-framework.org/", ""),
            "1: apiVersion: \"v1alpha1\" is not served: write ".to_owned(),
        ),
        (
            HEAD.replace("FluxInstance", "Fluxinstance"),
            "2: kind: \"Fluxinstance\" is not served: write FluxInstance".to_owned(),
        ),
        (HEAD.replace("kind: FluxInstance\n", ""), "1: kind: is missing: write FluxInstance".to_owned()),
        (
            HEAD.replace("apiVersion: distribute.flux-framework.org/v1alpha1\n", ""),
            "1: apiVersion: is missing: write ".to_owned(),
        ),
        (
            HEAD.replace("name: flux,", "name: other,"),
            format!("3: metadata.name: \"other\" is not served: {served} flux"),
        ),
        (HEAD.replace("name: flux, ", ""), "3: metadata.name: is missing: write flux".to_owned()),
        (
            HEAD.replace(": flux-distribute", ": default"),
            format!("3: metadata.namespace: \"default\" is not served: {served} flux-distribute"),
        ),
        (
            HEAD.replace("{name", "{labls: {}, name"),
            "3: metadata.labls: there is no such field: did you mean labels?".to_owned(),
        ),
    ] {
        let found = found(&format!("{text}spec: {{}}\n"));
        assert!(found.len() == 1 && found[0].starts_with(&expected), "{text}{found:?}");
    }
    // The namespace may be missing, because kubectl's -n can give it.
    assert_eq!(found(&format!("{}spec: {{}}\n", HEAD.replace(", namespace: flux-distribute", ""))), [""; 0]);
    assert_eq!(found("kind: FluxInstance\nspec: {size: 3}").len(), 2, "apiVersion and metadata.name are missing");
}

#[test]
fn a_field_that_is_given_twice_is_refused() {
    let expected = ["6: spec.size: is given a second time"];
    assert_eq!(found(&format!("{HEAD}spec:\n  size: 3\n  size: 4\n")), expected);
    assert_eq!(found("size: 3\nsize: 4\n"), ["2: spec.size: is given a second time"]);
}

#[test]
fn a_file_holds_a_whole_instance_or_a_bare_spec() {
    for (text, size) in [
        (format!("{HEAD}spec: {{size: 3}}"), Some(3)),
        (format!("{HEAD}spec: {{}}\nstatus: {{anything: 1}}"), None),
        ("size: 3".to_owned(), Some(3)),
        ("spec: {size: 3}".to_owned(), Some(3)),
        ("# as bundle inspect prints it\nspec:\n  size: 3\n".to_owned(), Some(3)),
        ("spec:\n".to_owned(), None),
        ("{}".to_owned(), None),
        ("---\n---\nsize: 3\n---\n".to_owned(), Some(3)),
        // As `kubectl get fxi -o yaml` prints it.
        (
            "apiVersion: v1\nkind: List\nitems:\n- apiVersion: distribute.flux-framework.org/v1alpha1\n  kind: FluxInstance\n  \
             metadata: {name: flux}\n  spec: {size: 3}\n"
                .to_owned(),
            Some(3),
        ),
    ] {
        assert_eq!(read_instance(&text).unwrap().size, size, "{text}");
    }
    for (text, finding) in [
        (format!("{HEAD}spec: {{sizes: 3}}"), "4: spec.sizes: there is no such field: did you mean size?"),
        (format!("{HEAD}spec: {{}}\nstats: {{}}"), "5: stats: there is no such field: did you mean status?"),
        // As the API server does: without a spec it is unclear whether the user means the defaults.
        (HEAD.to_owned(), "1: spec: is missing"),
        (format!("{HEAD}spec:"), "4: spec: is missing"),
        ("sizes: 3".to_owned(), "1: spec.sizes: there is no such field: did you mean size?"),
        (
            "nodes: {selector: {matchLabels: {any/name: x}}, size: 3}".to_owned(),
            "1: spec.nodes.size: there is no such field: did you mean spec.size?",
        ),
        ("spec:\n  size: 3\n  size: 4\n".to_owned(), "3: spec.size: is given a second time"),
        ("spec:\n  sizes: 3\n".to_owned(), "2: spec.sizes: there is no such field: did you mean size?"),
        ("[]".to_owned(), "1: spec: must be of type object, not array"),
        ("size: 0".to_owned(), "1: spec.size: is 0: to uninstall, delete the FluxInstance"),
    ] {
        assert_eq!(found(&text), [finding], "{text}");
    }
    assert!(found("a: [\n").first().is_some_and(|finding| finding.contains("is not YAML: ")));
}

#[test]
fn an_empty_file_holds_no_instance_but_an_empty_default_means_the_defaults() {
    for text in ["", "\n", "# comments only", "---\n# comments only\n---\n"] {
        let refused = read_instance(text).unwrap_err();
        assert_eq!(refused[0].to_string(), "holds no FluxInstance: it is empty", "{text}");
        assert_eq!(read_default(text), Ok(FluxInstanceSpec::default()), "{text}");
    }
    assert_eq!(read_default("size: 3").unwrap().size, Some(3));
    assert!(read_default("sizes: 3").is_err());
}

#[test]
fn documents_of_other_kinds_are_named_but_not_checked() {
    let text =
        format!("kind: Namespace\nmetadata: {{name: a}}\napiVersion: v1\n---\n{HEAD}spec:\n  size: 0\n---\nx: 1\n");
    let documents = read(&text).unwrap();
    assert_eq!(documents.others, ["Namespace a", "a document without a kind"]);
    assert_eq!(documents.specs.len(), 1);
    assert_eq!(documents.specs[0].findings[0].line, Some(9));

    let list = read("apiVersion: v1\nkind: List\nitems: [{kind: Node, metadata: {name: b}}]").unwrap();
    assert_eq!(list.others, ["Node b"]);
    let refused = read_instance("apiVersion: v1\nkind: ConfigMap\ndata: {}").unwrap_err();
    assert_eq!(refused[0].to_string(), "holds no FluxInstance, only ConfigMap");
    let two = format!("{HEAD}spec: {{}}\n---\n{HEAD}spec: {{}}\n");
    assert_eq!(read_instance(&two).unwrap_err()[0].to_string(), "holds more than one FluxInstance");
}

#[test]
fn the_spec_in_config_map_flux_default_is_checked_with_its_lines() {
    let map = |text: &str| {
        format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: flux-default}}\ndata:\n  spec.yaml: {text}\n")
    };
    assert_eq!(
        found(&map("|\n    # a comment\n    size: 3\n    lead: A\n")),
        ["8: spec.lead: \"A\" is not a node name"]
    );
    assert_eq!(found(&map("'{lead: A}'")), ["5: spec.lead: \"A\" is not a node name"]);
    for empty in ["''", "|\n    # a comment\n", "'spec:'"] {
        let documents = read(&map(empty)).unwrap();
        assert_eq!(documents.specs[0].spec, Some(FluxInstanceSpec::default()), "{empty}");
        assert_eq!(documents.specs[0].findings, [], "{empty}");
    }
    assert!(found(&map("|\n    size: [\n"))[0].contains("is not YAML"));
}
