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
fn a_command_is_given_key_lengths() {
    let line = format!(
        "{FLASHCORE} run {{in}} -o {{out}} --device cpu --mask {{mask}} --scale {{scale}} --softcap {{softcap}}"
    );
    let output = verify(&[
        "--command",
        &line,
        "--filter",
        "=masks/key-lengths-causal-f16",
        "--filter",
        "edges/no-keys",
    ]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    // What it is not asked about is counted with the reason.
    assert!(said.contains("a command is not asked about nothing"), "{said}");
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

fn example(name: &str) -> String {
    format!("{}/../../examples/verify/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_kernel_as_ptx_is_judged_in_the_simulator() {
    let (ptx, launch) = (example("attention.ptx"), example("launch.toml"));
    let cases = ["--filter", "lengths/self-len7-f16", "--filter", "=lengths/causal-len65-f16"];
    let output = verify(&[&["--ptx", &ptx, "--launch", &launch, "--device", "sim"], &cases[..]].concat());
    let said = text(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("ptx-sim") && said.contains("PASSED"), "{said}");
}

#[test]
fn a_fault_in_a_kernel_as_ptx_is_found_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let ptx = folder.path().join("kernel.ptx").to_string_lossy().into_owned();
    let right = std::fs::read_to_string(example("attention.ptx")).unwrap();
    let launch = example("launch.toml");
    let judged = |wrong: String| {
        assert_ne!(wrong, right);
        std::fs::write(&ptx, wrong).unwrap();
        let output = verify(&[
            "--ptx",
            &ptx,
            "--launch",
            &launch,
            "--device",
            "sim",
            "--filter",
            "=lengths/causal-len65-f16",
        ]);
        (output.status.code(), text(&output))
    };
    // One key fewer than the mask allows; the query that sees none divides by zero.
    let (code, said) = judged(right.replace("add.u32 %r14, %r2, 1;", "mov.u32 %r14, %r2;"));
    assert_eq!(code, Some(1), "{said}");
    let (code, said) = judged(right.replace("add.u32 %r14, %r2, 1;", "add.u32 %r14, %r2, 2;"));
    assert_eq!(code, Some(1), "{said}");
    let (code, said) = judged(right.replace("mul.f32 %f10, %f10, %f1;", "mul.f32 %f10, %f10, 0f3F800000;"));
    assert!(code == Some(1) && said.contains("kind: scale"), "{said}");
    let (code, said) = judged(right.replace("st.global.f32 [%rd8], %f16;", ""));
    assert!(code == Some(1) && said.contains("lse was not written"), "{said}");
    let (code, said) = judged(right.replace("ret;\n", "frob;\n"));
    assert!(code == Some(2) && said.contains("'frob' is not read here"), "{said}");
}

/// The example's kernel and description with a change, in a folder of their own.
fn damaged(ptx: (&str, &str), launch: (&str, &str)) -> (tempfile::TempDir, [String; 2]) {
    let folder = tempfile::tempdir().unwrap();
    let files = [("attention.ptx", ptx), ("launch.toml", launch)].map(|(name, (from, to))| {
        let right = std::fs::read_to_string(example(name)).unwrap();
        assert!(right.contains(from), "{from}");
        let path = folder.path().join(name);
        std::fs::write(&path, right.replacen(from, to, 1)).unwrap();
        path.to_string_lossy().into_owned()
    });
    (folder, files)
}

/// A kernel that waits for a flag that nobody sets.
const ENDLESS: (&str, &str) = ("$end:", "$end:\n$for_ever:\n    bra $for_ever;");
const AS_IT_IS: (&str, &str) = ("", "");
const ONE_CASE: [&str; 4] = ["--device", "sim", "--filter", "=lengths/causal-len65-f16"];

#[test]
fn a_kernel_as_ptx_that_does_not_end_fails_with_its_place_and_the_limit() {
    let (_folder, [ptx, launch]) = damaged(ENDLESS, AS_IT_IS);
    let files = ["--ptx", &ptx, "--launch", &launch];
    for limit in [&[][..], &["--limit", "5e4"]] {
        let output = verify(&[&files, &ONE_CASE[..], limit].concat());
        let said = text(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let number = if limit.is_empty() { "100000000" } else { "50000" };
        for part in ["kernel `attention` did not end", number, "block (", "warp 0", "line ", "set by --limit"]
        {
            assert!(said.contains(part), "{part} is missing in:\n{said}");
        }
        assert!(
            said.contains("see it again") && (limit.is_empty() || said.contains("--limit 50000")),
            "{said}"
        );
    }
    for (wrong, words) in [
        (&["--limit", "0"][..], "no number of warp instructions"),
        (&["--limit", "NaN"], "no number of warp instructions"),
        (&["--limit", "1.5"], "no number of warp instructions"),
    ] {
        let output = verify(&[&files, &ONE_CASE[..], wrong].concat());
        assert!(output.status.code() == Some(2) && text(&output).contains(words), "{}", text(&output));
    }
    let output = verify(&["--device", "cpu", "--limit", "5"]);
    assert!(output.status.code() == Some(2) && text(&output).contains("--limit is for"), "{}", text(&output));
}

#[test]
fn a_launch_that_cannot_be_meant_is_refused_before_it_takes_time_or_memory() {
    for (from, to, words) in [
        ("\"len_q\", \"heads_q\", \"batch\"]", "4000000000, 1, 1]", "a grid of [4000000000, 1, 1] blocks"),
        ("\"len_q\", \"heads_q\", \"batch\"]", "2000000000, 1, 1]", "set by --limit"),
        ("\"len_q\", \"heads_q\", \"batch\"]", "65535, 65535, 65535]", "set by --limit"),
        ("block = [32, 1, 1]", "block = [4194304, 2097152, 2097152]", "a block of"),
        ("shared = 0", "shared = 4294967295", "shared memory"),
    ] {
        let (_folder, [ptx, launch]) = damaged(AS_IT_IS, (from, to));
        let output = verify(&[&["--ptx", &ptx, "--launch", &launch], &ONE_CASE[..]].concat());
        let said = text(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(words), "{words} is missing in:\n{said}");
    }
    let huge = "\"99999999999*99999999999\", 1, 1]";
    let (_folder, [ptx, launch]) = damaged(AS_IT_IS, ("\"len_q\", \"heads_q\", \"batch\"]", huge));
    let output = verify(&[&["--ptx", &ptx, "--launch", &launch], &ONE_CASE[..]].concat());
    assert!(output.status.code() == Some(2) && text(&output).contains("too large"), "{}", text(&output));
}

#[test]
fn text_that_is_no_ptx_is_refused_with_its_line() {
    for (from, to, words) in [
        ("cvt.u64.u32 %rd1, %r12;", "cvta %rd1, %rd2;", "line 40: 'cvta %rd1, %rd2' is not read here"),
        ("0fFF800000", "0fFF8", "0f with the eight digits"),
        ("%rd<12>", "%rd<12>, %😀", "line 24"),
        ("ld.global.b32 %r13, [%rd4];", "ld.global.b32 %r13, [%rd4]", "line 72"),
    ] {
        let (_folder, [ptx, launch]) = damaged((from, to), AS_IT_IS);
        let output = verify(&[&["--ptx", &ptx, "--launch", &launch], &ONE_CASE[..]].concat());
        let said = text(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(words), "{words} is missing in:\n{said}");
    }
}

/// However long the kernel may run, Ctrl-C is heard: else this does not end.
#[test]
fn ctrl_c_ends_a_kernel_that_does_not_end() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    let (_folder, [ptx, launch]) = damaged(ENDLESS, AS_IT_IS);
    let files = ["--ptx", &ptx, "--launch", &launch, "--limit", "9e15"];
    let mut command = Command::new(FLASHCORE);
    command.arg("verify").args(files).args(ONE_CASE).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut verify = command.spawn().unwrap();
    // It listens to Ctrl-C from before its first line on.
    let mut said = BufReader::new(verify.stdout.take().unwrap());
    said.read_line(&mut String::new()).unwrap();
    let interrupted = Command::new("kill").args(["-INT", &verify.id().to_string()]).status().unwrap();
    assert!(interrupted.success());
    assert_eq!(verify.wait().unwrap().code(), Some(2));
}

/// The example of a command, where there is a Python with NumPy.
#[test]
fn the_example_in_numpy_passes_where_there_is_numpy() {
    let python = std::env::var("FLASHCORE_PYTHON").unwrap_or_else(|_| "python3".into());
    let numpy = Command::new(&python).args(["-c", "import numpy"]).output();
    if !numpy.is_ok_and(|output| output.status.success()) {
        println!("{python} has no NumPy: the example was not run");
        return;
    }
    let line = format!("{python} {} {{in}} {{out}}", example("numpy_attention.py"));
    let cases = [
        "lengths/self-len7",
        "=lengths/causal-len65-bf16",
        "masks/window",
        "heads/grouped",
        "masks/key-lengths",
    ];
    let filters: Vec<&str> = cases.iter().flat_map(|case| ["--filter", case]).collect();
    let output = verify(&[&["--command", &line], &filters[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
}
