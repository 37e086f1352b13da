//! The command, the tests and the lints are built from the same crates, once: they ask for the same features of them.

use std::collections::BTreeMap;
use std::process::Command;

/// The features of every crate that a selection of packages is built from, as `cargo tree` tells them.
fn features(selection: &[&str]) -> BTreeMap<String, String> {
    let tree = ["tree", "--offline", "--locked", "--prefix", "none", "--format", "{p}\t{f}"];
    let output = Command::new(env!("CARGO"))
        .args([&tree, selection].concat())
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    // A crate that was shown before is marked, and so are macros.
    let lines = text.lines().filter_map(|line| line.trim_end_matches(" (*)").split_once('\t'));
    lines.map(|(name, features)| (name.replace(" (proc-macro)", ""), features.to_string())).collect()
}

#[test]
fn the_command_and_the_tests_ask_for_the_same_features() {
    let command = features(&["--package", "flashcore-lab", "--edges", "normal,build"]);
    assert!(command.len() > 100, "{command:?}");
    for selection in [&["--workspace", "--exclude", "flashcore-attn"][..], &["--workspace"]] {
        let tests = features(selection);
        let differ: Vec<_> = command
            .iter()
            .filter(|(name, _)| !name.starts_with("flashcore"))
            .filter(|(name, features)| tests.get(*name) != Some(*features))
            .map(|(name, features)| format!("{name}: {features}; tests: {:?}", tests.get(name)))
            .collect();
        let advice = "ask for the missing ones in crates/features/Cargo.toml";
        assert!(differ.is_empty(), "{advice}\n{}", differ.join("\n"));
    }
}
