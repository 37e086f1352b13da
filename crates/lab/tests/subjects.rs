//! Somebody else's attention under test, through the command: an honest subject passes, a wrong one is explained.
#![cfg(unix)]

use std::process::{Command, Output};

const FLASHCORE: &str = env!("CARGO_BIN_EXE_flashcore");

fn verify(arguments: &[&str]) -> Output {
    Command::new(FLASHCORE).arg("verify").args(arguments).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn a_command_that_reads_and_writes_safetensors_is_judged_as_an_engine_is() {
    let line =
        format!("{FLASHCORE} run {{in}} -o {{out}} --device cpu --lse --mask {{mask}} --scale {{scale}}");
    let output = verify(&[
        "--command",
        &line,
        "--filter",
        "lengths/causal-len65",
        "--filter",
        "lengths/self-len7-f16",
    ]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("command") && said.contains("PASSED"), "{said}");
}

#[test]
fn a_command_that_ignores_the_mask_is_found_out_and_told_how_to_see_it_again() {
    let line = format!("{FLASHCORE} run {{in}} -o {{out}} --device cpu --scale {{scale}}");
    let output = verify(&["--command", &line, "--filter", "=lengths/causal-len65-f16"]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for part in ["kind: mask: every key is seen", "first bad element", "bad rows, one character", "--command"]
    {
        assert!(said.contains(part), "{part} is missing in:\n{said}");
    }
    // It writes no lse, so lse is not asked of it.
    assert!(!said.contains("lse  error"), "{said}");
}

#[test]
fn a_subject_that_cannot_be_had_is_no_pass() {
    for arguments in [
        &["--subject", "tensorflow"][..],
        &["--command", "true {in}"],
        &["--command", "false {in} {out}"],
        &["--ptx", "nothing.ptx", "--launch", "nothing.toml"],
    ] {
        let output = verify(arguments);
        assert_eq!(output.status.code(), Some(2), "{}", text(&output));
        assert!(text(&output).contains("error: "), "{}", text(&output));
    }
}

/// Where torch is installed it is put under test; elsewhere the message says how to name a Python that has it.
#[test]
fn torch_is_judged_as_an_engine_is_where_there_is_one() {
    let output = verify(&[
        "--subject",
        "torch",
        "--filter",
        "lengths/self-len7-f16",
        "--filter",
        "=lengths/causal-len65-f16",
    ]);
    let said = text(&output);
    match output.status.code() {
        Some(0) => assert!(said.contains("torch") && said.contains("PASSED"), "{said}"),
        Some(2) => assert!(said.contains("FLASHCORE_PYTHON"), "{said}"),
        other => panic!("{other:?}: {said}"),
    }
}
