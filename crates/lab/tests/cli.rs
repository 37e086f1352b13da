//! The command as people meet it: what it says, its exit codes, and what it leaves on the disk.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use flashcore::{Attention, DType, Device, Element, TensorBuf};
use flashcore_lab::rng::Rng;
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

fn flashcore() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
    // No test depends on what this machine has installed.
    command.env("FLASHCORE_PYTHON", "no-such-python");
    command
}

fn answer(arguments: &[&str]) -> Output {
    flashcore().args(arguments).output().expect("the command starts")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("it was not killed")
}

/// A tensor of a file: dtype, shape and bytes.
type Stored = (Dtype, Vec<usize>, Vec<u8>);

/// A folder for one test, with the file that it runs on.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn save(&self, name: &str, tensors: &HashMap<&str, Stored>) -> PathBuf {
        let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (*name, TensorView::new(*dtype, shape.clone(), bytes).expect("bytes that fit"))
        });
        let path = self.path(name);
        std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
        path
    }

    /// Everything in the folder, by name.
    fn files(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn run(&self, more: &[&str]) -> Output {
        let (input, output) = (self.path("in.safetensors"), self.path("out.safetensors"));
        flashcore().arg("run").arg(input).arg("-o").arg(output).args(more).output().unwrap()
    }
}

fn values(seed: u64, len: usize) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| rng.normal() as f32).collect()
}

fn stored(dtype: Dtype, shape: &[usize], values: &[f32]) -> Stored {
    let bytes = match dtype {
        Dtype::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        _ => unreachable!("only what attention runs on"),
    };
    (dtype, shape.to_vec(), bytes)
}

/// q, k and v as (batch 2, heads 4 and 2, lengths 5 and 7, head_dim 16).
fn qkv(dtype: Dtype) -> HashMap<&'static str, Stored> {
    HashMap::from([
        ("q", stored(dtype, &[2, 4, 5, 16], &values(1, 640))),
        ("k", stored(dtype, &[2, 2, 7, 16], &values(2, 448))),
        ("v", stored(dtype, &[2, 2, 7, 16], &values(3, 448))),
    ])
}

/// What the library computes for [`qkv`], as bytes.
fn expected<T: Element>(dtype: DType, attention: &Attention<'_>) -> (Vec<f32>, Vec<f32>) {
    assert_eq!(T::DTYPE, dtype);
    let buf = |seed, shape: [usize; 4]| {
        TensorBuf::from_f32(&values(seed, shape.iter().product()), shape, dtype).unwrap()
    };
    let (q, k, v) = (buf(1, [2, 4, 5, 16]), buf(2, [2, 2, 7, 16]), buf(3, [2, 2, 7, 16]));
    let out = attention.with_lse().run(&Device::best(), &q.view(), &k.view(), &v.view()).unwrap();
    (out.o.to_f32(), out.lse.unwrap().to_f32())
}

/// A tensor of a file as f32, with its shape.
fn load(path: &Path, name: &str) -> (Vec<usize>, Vec<f32>) {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor(name).unwrap();
    let data = tensor.data();
    let values = match tensor.dtype() {
        Dtype::F16 => data.chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Dtype::BF16 => data.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        _ => data.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    };
    (tensor.shape().to_vec(), values)
}

#[test]
fn without_arguments_it_says_in_ten_lines_what_to_try_first() {
    let output = answer(&[]);
    assert_eq!(code(&output), 0);
    let text = stdout(&output);
    assert!(text.lines().count() <= 11, "{text}");
    for word in ["doctor", "bench mission", "verify", "run"] {
        assert!(text.contains(word), "{word} is missing in {text}");
    }
}

#[test]
fn doctor_says_what_there_is_and_what_would_be_chosen() {
    let place = Place::new();
    let json = place.path("doctor.json");
    let output = flashcore().arg("doctor").arg("--json").arg(&json).output().unwrap();
    assert_eq!(code(&output), 0);
    let text = stdout(&output);
    assert!(text.contains("cores") || text.contains("core"), "{text}");
    assert!(text.contains("because") && text.contains("portable") && text.contains("gpu"), "{text}");
    let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["schema"], "flashcore.doctor/1");
    assert!(report["environment"]["cpu"]["cores"].as_u64().unwrap() > 0);
    assert!(report["paths"].as_array().unwrap().iter().any(|path| path["chosen"] == true));
    assert_eq!(report["torch"]["found"], false);
    assert!(report["command"][1] == "doctor" && report["complete"] == true);
}

#[test]
fn an_instruction_set_can_be_chosen_by_the_environment() {
    let output = flashcore().arg("doctor").env("FLASHCORE_CPU", "portable").output().unwrap();
    assert!(stdout(&output).contains("cpu (portable"), "{}", stdout(&output));
}

#[test]
fn run_writes_what_the_library_computes_in_every_dtype() {
    let attention = Attention::new().causal().softcap(20.0).scale(0.3);
    let cases = [
        (Dtype::F16, expected::<f16>(DType::F16, &attention)),
        (Dtype::BF16, expected::<bf16>(DType::BF16, &attention)),
        (Dtype::F32, expected::<f32>(DType::F32, &attention)),
    ];
    for (dtype, (o, lse)) in cases {
        let place = Place::new();
        place.save("in.safetensors", &qkv(dtype));
        let output = place.run(&["--causal", "--softcap", "20", "--scale", "0.3", "--lse"]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        let out = place.path("out.safetensors");
        assert_eq!(load(&out, "o"), (vec![2, 4, 5, 16], o));
        assert_eq!(load(&out, "lse"), (vec![2, 4, 5], lse));
        assert_eq!(place.files(), ["in.safetensors", "out.safetensors"]);
    }
}

#[test]
fn run_takes_the_other_layout_and_answers_in_it() {
    let transpose = |values: &[f32], [b, h, s, d]: [usize; 4]| -> Vec<f32> {
        let at = |i: usize| {
            let (ib, is, ih, id) = (i / (s * h * d), i / (h * d) % s, i / d % h, i % d);
            values[((ib * h + ih) * s + is) * d + id]
        };
        (0..b * h * s * d).map(at).collect()
    };
    let place = Place::new();
    let bshd = |seed, [b, h, s, d]: [usize; 4]| {
        stored(Dtype::F32, &[b, s, h, d], &transpose(&values(seed, b * h * s * d), [b, h, s, d]))
    };
    let tensors = HashMap::from([
        ("q", bshd(1, [2, 4, 5, 16])),
        ("k", bshd(2, [2, 2, 7, 16])),
        ("v", bshd(3, [2, 2, 7, 16])),
    ]);
    place.save("in.safetensors", &tensors);
    let output = place.run(&["--layout", "bshd", "--window", "3,inf", "--lse"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let (o, lse) = expected::<f32>(DType::F32, &Attention::new().window(3, None));
    let out = place.path("out.safetensors");
    assert_eq!(load(&out, "o"), (vec![2, 5, 4, 16], transpose(&o, [2, 4, 5, 16])));
    assert_eq!(load(&out, "lse"), (vec![2, 5, 4], transpose(&lse, [2, 4, 5, 1])));
}

#[test]
fn run_reads_key_lengths_of_any_integer() {
    let (o, _) = expected::<f16>(DType::F16, &Attention::new().key_lengths(&[7, 2]));
    let lengths: [(Dtype, Vec<u8>); 3] = [
        (Dtype::I32, [7_i32, 2].iter().flat_map(|x| x.to_le_bytes()).collect()),
        (Dtype::U32, [7_u32, 2].iter().flat_map(|x| x.to_le_bytes()).collect()),
        (Dtype::I64, [7_i64, 2].iter().flat_map(|x| x.to_le_bytes()).collect()),
    ];
    for (dtype, bytes) in lengths {
        let place = Place::new();
        let mut tensors = qkv(Dtype::F16);
        tensors.insert("key_lengths", (dtype, vec![2], bytes));
        place.save("in.safetensors", &tensors);
        let output = place.run(&["--device", "cpu"]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        assert_eq!(load(&place.path("out.safetensors"), "o").1, o);
    }
}

#[test]
fn run_says_so_when_it_replaces_a_file_and_refuses_to_overwrite_its_input() {
    let place = Place::new();
    let input = place.save("in.safetensors", &qkv(Dtype::F32));
    assert!(stdout(&place.run(&[])).contains("wrote"));
    assert!(stdout(&place.run(&[])).contains("replaced"));
    let before = std::fs::read(&input).unwrap();
    let output =
        flashcore().arg("run").arg(&input).arg("-o").arg(place.path("./in.safetensors")).output().unwrap();
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("OUT is IN"), "{}", stderr(&output));
    assert_eq!(std::fs::read(&input).unwrap(), before);
}

#[test]
fn run_reports_in_json_what_it_did() {
    let place = Place::new();
    place.save("in.safetensors", &qkv(Dtype::BF16));
    let json = place.path("run.json");
    let output = place.run(&["--mask", "causal-top-left", "--json", json.to_str().unwrap()]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["schema"], "flashcore.run/1");
    assert!(report["problem"].as_str().unwrap().contains("bf16 causal-top-left"));
    assert!(report["call_us"].as_f64().unwrap() > 0.0);
}

/// Runs on a bad file or with bad options, and requires exit code 2, the words, and nothing on the disk.
fn refuses(tensors: &HashMap<&str, Stored>, more: &[&str], words: &[&str]) {
    let place = Place::new();
    place.save("in.safetensors", tensors);
    let output = place.run(more);
    let text = stderr(&output);
    assert_eq!(code(&output), 2, "{text}");
    for word in words {
        assert!(text.contains(word), "'{word}' is missing in: {text}");
    }
    assert_eq!(place.files(), ["in.safetensors"], "{text}");
}

#[test]
fn a_missing_tensor_is_named_with_what_the_file_holds() {
    let mut tensors = qkv(Dtype::F16);
    tensors.remove("v");
    refuses(&tensors, &[], &["no tensor v", "q F16 [2, 4, 5, 16]"]);
    refuses(&HashMap::new(), &[], &["no tensor q", "no tensors"]);
}

#[test]
fn a_wrong_shape_or_dtype_is_named_with_what_to_do() {
    let with = |name, tensor| {
        let mut tensors = qkv(Dtype::F16);
        tensors.insert(name, tensor);
        tensors
    };
    let f16 = |shape: &[usize]| stored(Dtype::F16, shape, &vec![0.5; shape.iter().product()]);
    refuses(&with("k", f16(&[7, 16])), &[], &["k has the shape [7, 16]", "four dimensions"]);
    refuses(&with("k", f16(&[2, 3, 7, 16])), &[], &["v has heads 2", "k asks for 3"]);
    refuses(&with("k", f16(&[2, 2, 7, 8])), &[], &["k has head_dim 8", "16"]);
    refuses(&with("v", f16(&[1, 2, 7, 16])), &[], &["v has batch 1"]);
    refuses(
        &with("v", stored(Dtype::F32, &[2, 2, 7, 16], &[0.5; 448])),
        &[],
        &["v is F32", "q is F16", "Convert"],
    );
    refuses(&with("q", (Dtype::I64, vec![1], vec![0; 8])), &[], &["q is I64", "possible are F16"]);
}

#[test]
fn wrong_key_lengths_are_named() {
    let with = |dtype, shape: &[usize], bytes: Vec<u8>| {
        let mut tensors = qkv(Dtype::F16);
        tensors.insert("key_lengths", (dtype, shape.to_vec(), bytes));
        tensors
    };
    refuses(&with(Dtype::I32, &[1], vec![1, 0, 0, 0]), &[], &["1 key lengths", "batch of 2"]);
    refuses(&with(Dtype::U32, &[2], vec![8, 0, 0, 0, 1, 0, 0, 0]), &[], &["is 8", "length 7"]);
    refuses(&with(Dtype::I32, &[2], vec![255; 8]), &[], &["holds -1"]);
    refuses(&with(Dtype::F32, &[2], vec![0; 8]), &[], &["key_lengths is F32", "I64"]);
    refuses(&with(Dtype::I32, &[2, 1], vec![0; 8]), &[], &["one number per batch entry"]);
}

#[test]
fn wrong_options_are_named() {
    let good = qkv(Dtype::F32);
    refuses(&good, &["--scale", "-1"], &["scale is -1"]);
    refuses(&good, &["--scale", "nan"], &["scale is NaN"]);
    refuses(&good, &["--softcap", "-3"], &["softcap is -3"]);
    refuses(&good, &["--device", "tpu"], &["tpu", "cpu-portable"]);
    refuses(&good, &["--mask", "diagonal"], &["diagonal", "causal-top-left"]);
    refuses(&good, &["--window", "3"], &["LEFT,RIGHT"]);
    refuses(&good, &["--causal", "--window", "3,4"], &["cannot be used with"]);
    refuses(&good, &["--layout", "sbhd"], &["bshd"]);
    refuses(&good, &["--json", "/no/such/folder/x.json"], &["no folder"]);
}

#[test]
fn a_file_that_is_missing_or_no_safetensors_is_named() {
    let place = Place::new();
    let output = place.run(&[]);
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("check the path"), "{}", stderr(&output));
    std::fs::write(place.path("in.safetensors"), b"not tensors at all").unwrap();
    let output = place.run(&[]);
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("not a safetensors file"), "{}", stderr(&output));
    assert_eq!(place.files(), ["in.safetensors"]);
}

#[test]
fn a_damaged_file_never_panics_and_never_leaves_anything() {
    let place = Place::new();
    let path = place.save("in.safetensors", &qkv(Dtype::F16));
    let good = std::fs::read(&path).unwrap();
    let mut rng = Rng::new(5);
    for round in 0..60 {
        let mut bytes = good.clone();
        if round % 3 == 0 {
            bytes.truncate(rng.below(bytes.len()));
        } else {
            // Most of the damage goes to the header, where it has the most effect.
            for _ in 0..=rng.below(4) {
                let place = rng.below(300);
                bytes[place] = rng.next_u64() as u8;
            }
        }
        std::fs::write(&path, &bytes).unwrap();
        let output = place.run(&[]);
        assert!([0, 2].contains(&code(&output)), "{}", stderr(&output));
        if code(&output) == 2 {
            assert!(stderr(&output).starts_with("error: "), "{}", stderr(&output));
            assert_eq!(place.files(), ["in.safetensors"]);
        } else {
            std::fs::remove_file(place.path("out.safetensors")).unwrap();
        }
    }
}

#[test]
fn an_output_in_no_folder_or_onto_a_folder_is_refused_before_the_work() {
    let place = Place::new();
    let input = place.save("in.safetensors", &qkv(Dtype::F16));
    for (out, words) in [("missing/out.safetensors", "no folder"), ("", "is a folder")] {
        let output = flashcore().arg("run").arg(&input).arg("-o").arg(place.path(out)).output().unwrap();
        assert_eq!(code(&output), 2);
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
    }
    assert_eq!(place.files(), ["in.safetensors"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_said_and_leaves_nothing() {
    let place = Place::new();
    let input = place.save("in.safetensors", &qkv(Dtype::F32));
    let output = flashcore().arg("run").arg(&input).args(["-o", "/dev/full"]).output().unwrap();
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("No space left"), "{}", stderr(&output));

    // A limit on the size of files stops a regular file half-way: it is removed, and an old one stays.
    let out = place.path("out.safetensors");
    std::fs::write(&out, "an older result").unwrap();
    let script = format!(
        "trap '' XFSZ; ulimit -f 2; exec '{}' run '{}' -o '{}'",
        env!("CARGO_BIN_EXE_flashcore"),
        input.display(),
        out.display()
    );
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(code(&output), 2, "{}", stderr(&output));
    assert!(stderr(&output).contains("free some space"), "{}", stderr(&output));
    assert_eq!(std::fs::read(&out).unwrap(), b"an older result");
    assert_eq!(place.files(), ["in.safetensors", "out.safetensors"]);
    let output = flashcore().args(["doctor", "--json", "/dev/full"]).output().unwrap();
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("No space left"), "{}", stderr(&output));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_behind_stdout_is_said_and_a_reader_that_went_away_is_not() {
    for arguments in
        [&["doctor"][..], &["--help"], &["bench", "--help"], &["--version"], &["plan", "mission"], &[]]
    {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = flashcore().args(arguments).stdout(full).output().unwrap();
        assert_eq!(code(&output), 2, "{arguments:?}");
        assert!(stderr(&output).contains("No space left"), "{arguments:?}: {}", stderr(&output));
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = flashcore().args(arguments).stdout(writer).output().unwrap();
        assert_eq!((code(&output), stderr(&output).as_str()), (2, ""), "{arguments:?}");
    }
    // Nobody needs stderr to compute.
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let verify = ["verify", "--device", "cpu", "--filter", "lengths/self-len7-f16"];
    assert_eq!(code(&flashcore().args(verify).stderr(full).output().unwrap()), 0);
}

#[cfg(unix)]
#[test]
fn an_argument_that_is_no_text_stands_in_the_report_as_well_as_it_can() {
    use std::os::unix::ffi::OsStrExt;
    let place = Place::new();
    place.save("in.safetensors", &qkv(Dtype::F16));
    let (json, odd) = (place.path("report.json"), std::ffi::OsStr::from_bytes(b"out-\xff.safetensors"));
    let output = flashcore()
        .current_dir(place.folder.path())
        .args(["run", "in.safetensors", "-o"])
        .arg(odd)
        .arg("--json")
        .arg(&json)
        .output()
        .unwrap();
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(place.folder.path().join(odd).is_file());
    let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["output"], "out-\u{fffd}.safetensors");
    assert!(report["command"].as_array().unwrap().iter().any(|it| it == "out-\u{fffd}.safetensors"));
    // Where text is needed, it is refused.
    let output = flashcore().args(["bench"]).arg(odd).arg("--json").arg(&json).output().unwrap();
    assert_eq!(code(&output), 2, "{}", stderr(&output));
}

#[cfg(target_os = "linux")]
#[test]
fn a_shape_that_needs_more_memory_than_there_is_is_refused_before_anything_is_drawn() {
    let output = answer(&["bench", "1x1x1000000000x64", "--no-peers", "--device", "cpu"]);
    assert_eq!(code(&output), 2, "{}", stderr(&output));
    assert!(stderr(&output).contains("TB of memory") && stderr(&output).contains("can be had"));
    assert_eq!(stdout(&output), "");
}

#[cfg(target_os = "linux")]
#[test]
fn memory_that_runs_out_all_the_same_ends_with_two() {
    let place = Place::new();
    place.save("in.safetensors", &qkv(Dtype::F16));
    let script =
        format!("ulimit -v 40000; exec {} verify --device cpu --full", env!("CARGO_BIN_EXE_flashcore"));
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(code(&output), 2, "{}", stderr(&output));
}

#[test]
#[ignore = "the process of the test below"]
fn a_process_that_panics() {
    if std::env::var_os("FLASHCORE_TEST_PANIC").is_some() {
        flashcore_lab::cli::end_on_panic();
        let _ = std::thread::spawn(|| panic!("a planted fault")).join();
        unreachable!("the panic of any thread ends the process");
    }
}

#[test]
fn a_panic_of_any_thread_ends_with_two_and_asks_for_a_report() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_process_that_panics", "--ignored"])
        .env("FLASHCORE_TEST_PANIC", "1")
        .output()
        .unwrap();
    assert_eq!(code(&output), 2, "{}", stderr(&output));
    let said = stderr(&output);
    assert!(said.contains("a planted fault") && said.contains("Please report it"), "{said}");
    assert!(!said.contains("backtrace"), "{said}");
}

/// The number that a process writes to a file, once it is there.
#[cfg(target_os = "linux")]
fn number_in(path: &Path) -> u32 {
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if let Some(number) = text.strip_suffix('\n') {
            return number.parse().unwrap();
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Waits until a process is gone; forever where it is not.
#[cfg(target_os = "linux")]
fn wait_for_end_of(process: u32) {
    let runs = || {
        let state = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        state.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
    };
    while runs() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// A command under test that starts a process which would run for long, and writes down its number.
#[cfg(target_os = "linux")]
fn lingering(place: &Place) -> (String, PathBuf) {
    let number = place.path("number");
    let line = format!(
        ": {{in}} {{out}}; sh -c 'sleep 3000 & echo $! > {0}.part; mv {0}.part {0}; wait'; :",
        number.display()
    );
    (line, number)
}

#[cfg(target_os = "linux")]
#[test]
fn a_command_that_is_too_slow_ends_with_all_that_it_started() {
    let place = Place::new();
    let (line, number) = lingering(&place);
    let output = answer(&["verify", "--command", &line, "--limit", "1"]);
    assert_eq!(code(&output), 2, "{}", stderr(&output));
    assert!(stderr(&output).contains("did not end within 1 s"), "{}", stderr(&output));
    wait_for_end_of(number_in(&number));
    // What a command leaves running when it ends normally is ended, too.
    let number = place.path("second");
    let line = format!(": {{in}} {{out}}; sleep 3000 & echo $! > {}", number.display());
    assert_eq!(code(&answer(&["verify", "--command", &line])), 2);
    wait_for_end_of(number_in(&number));
}

#[cfg(target_os = "linux")]
#[test]
fn a_command_ends_with_the_workbench_whether_it_is_interrupted_or_killed() {
    for signal in ["-INT", "-TERM", "-KILL"] {
        let place = Place::new();
        let (line, number) = lingering(&place);
        let mut child = flashcore()
            .args(["verify", "--command", &line, "--limit", "3000"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let grandchild = number_in(&number);
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let status = child.wait().unwrap();
        if signal == "-INT" {
            assert_eq!(status.code(), Some(2));
        }
        wait_for_end_of(grandchild);
    }
}

#[cfg(unix)]
#[test]
fn readers_of_evidence_hear_an_interrupt() {
    for command in [&["report", "-o", "out"][..], &["evidence", "verify"]] {
        let place = Place::new();
        let pipe = place.path("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let child = flashcore()
            .current_dir(place.folder.path())
            .args(command)
            .arg("pipe")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let writer = std::fs::OpenOptions::new().write(true).open(&pipe).unwrap();
        interrupt(&child);
        let output = child.wait_with_output().unwrap();
        drop(writer);
        assert_eq!(code(&output), 2, "{}", stderr(&output));
        assert!(stderr(&output).contains("interrupted"), "{}", stderr(&output));
    }
}

/// A call of this takes far longer than the test may. Whether the interrupt comes in the middle of it or a moment before is
/// up to the machine.
#[cfg(unix)]
#[test]
fn an_interrupt_is_heard_around_a_long_step() {
    let shape = "1x1x4000000/2000000x1";
    let (output, report) = interrupted(&["bench", shape, "--device", "cpu", "--no-peers", "--threads", "1"]);
    assert_eq!(code(&output), 2, "{}", stderr(&output));
    assert_eq!(report["complete"], false);
    assert!(report["cells"].as_array().unwrap().is_empty());
    assert!(stdout(&output).contains("what was measured until then is kept"), "{}", stdout(&output));
}

#[cfg(unix)]
fn interrupt(process: &std::process::Child) {
    let status = Command::new("kill").args(["-INT", &process.id().to_string()]).status().unwrap();
    assert!(status.success());
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_says_so_and_leaves_nothing() {
    let place = Place::new();
    // Reading from a pipe that nobody fills, the command waits for as long as the test needs.
    let pipe = place.path("in.safetensors");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let child = flashcore()
        .arg("run")
        .arg(&pipe)
        .arg("-o")
        .arg(place.path("out.safetensors"))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Opening the writing end waits until the command has opened the other, which it does with its handler set.
    let writer = std::fs::OpenOptions::new().write(true).open(&pipe).unwrap();
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    drop(writer);
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("interrupted"), "{}", stderr(&output));
    assert_eq!(place.files(), ["in.safetensors"]);
}

/// Starts a long command with a report, interrupts it after its first lines, and returns the report.
#[cfg(unix)]
fn interrupted(arguments: &[&str]) -> (Output, Value) {
    let place = Place::new();
    let json = place.path("report.json");
    let mut child = flashcore()
        .args(arguments)
        .arg("--json")
        .arg(&json)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.next().unwrap().unwrap();
    interrupt(&child);
    let said: Vec<String> = lines.map(|line| line.unwrap()).collect();
    let mut output = child.wait_with_output().unwrap();
    output.stdout = said.join("\n").into_bytes();
    let report = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(place.files(), ["report.json"]);
    (output, report)
}

#[cfg(unix)]
#[test]
fn an_interrupted_verify_keeps_what_it_has() {
    let (output, report) = interrupted(&["verify", "--full"]);
    assert_eq!(code(&output), 2, "{}", stderr(&output));
    assert_eq!(report["complete"], false);
    assert!(report["results"].as_array().unwrap().len() < 3000);
    assert!(stderr(&output).contains("stopping after this step"), "{}", stderr(&output));
}

#[cfg(unix)]
#[test]
fn an_interrupted_bench_keeps_what_it_has() {
    let (output, report) = interrupted(&["bench", "mission", "--no-peers", "--samples", "100000"]);
    assert_eq!(code(&output), 2, "{}", stderr(&output));
    assert_eq!(report["complete"], false);
    assert!(stdout(&output).contains("what was measured until then is kept"), "{}", stdout(&output));
}

#[test]
fn verify_judges_every_engine_and_says_so_in_json() {
    let place = Place::new();
    let json = place.path("verify.json");
    let output = answer(&["verify", "--filter", "edges/one", "--json", json.to_str().unwrap()]);
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
    assert!(stdout(&output).contains("PASSED"));
    let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["schema"], "flashcore.verify/2");
    let results = report["results"].as_array().unwrap();
    let engines = report["engines"].as_array().unwrap();
    assert!(engines.iter().any(|engine| engine["engine"] == "cpu-portable"));
    assert_eq!(results.len() % engines.len(), 0);
    for result in results {
        assert_eq!(result["status"], "passed");
        assert!(result["judgement"]["max"]["allowed"].as_f64().unwrap() > 0.0);
        assert!(result["reproduce"].as_str().unwrap().contains("--filter '=edges/one"));
    }
}

#[test]
fn verify_judges_gradients_where_it_is_asked_to() {
    let filter = ["--filter", "lengths/self-len7-f16", "--filter", "edges/one"];
    let output =
        answer(&[&["verify", "--device", "cpu-portable", "--pass", "backward"], &filter[..]].concat());
    let said = stdout(&output) + &stderr(&output);
    assert_eq!(code(&output), 0, "{said}");
    assert!(said.contains("backward/") && said.contains("PASSED"), "{said}");
    // A GPU's kernels compute one pass each.
    let output =
        answer(&[&["verify", "--device", "sim-sm80_bwd", "--pass", "backward"], &filter[..]].concat());
    assert_eq!(code(&output), 0, "{}", stdout(&output));
    let output =
        answer(&[&["verify", "--device", "sim-sm80_fwd", "--pass", "backward"], &filter[..]].concat());
    assert!(code(&output) == 2 && stdout(&output).contains("computes no gradients"), "{}", stdout(&output));
    assert!(stderr(&answer(&["verify", "--pass", "sideways"])).contains("forward, backward and both"));
}

#[test]
fn verify_runs_one_case_by_its_whole_name_on_one_engine() {
    let output = answer(&["verify", "--device", "cpu-portable", "--filter", "=lengths/self-len7-f16"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).contains("1 cases on cpu-portable;"), "{}", stdout(&output));
}

#[test]
fn verify_says_what_to_do_when_nothing_matches() {
    let output = answer(&["verify", "--filter", "no such case"]);
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("names are such as"), "{}", stderr(&output));
    let output = answer(&["verify", "--filter", "lengths/long"]);
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("add --full"), "{}", stderr(&output));
    let output = answer(&["verify", "--device", "tpu"]);
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("cpu-portable"), "{}", stderr(&output));
}

#[test]
fn bench_shows_time_rate_and_error_and_keeps_its_samples() {
    let place = Place::new();
    let json = place.path("bench.json");
    let arguments = ["bench", "tiny", "1x4/2x16/40x32", "--dtype", "all", "--samples", "6", "--threads", "1"];
    let output = flashcore().args(arguments).arg("--json").arg(&json).output().unwrap();
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
    let text = stdout(&output);
    assert!(
        text.contains("1x1x32x64 bf16 full") && text.contains("GFLOP/s") && text.contains("right"),
        "{text}"
    );
    assert!(text.contains("without torch"), "{text}");
    let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!((&report["schema"], &report["clock"]), (&"flashcore.bench/2".into(), &"call".into()));
    let cells = report["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 6);
    for cell in cells {
        let ours = &cell["results"][0];
        assert_eq!(ours["samples_us"].as_array().unwrap().len(), 6);
        assert!(ours["p50_us"].as_f64().unwrap() >= ours["min_us"].as_f64().unwrap());
        assert!(ours["gflops"].as_f64().unwrap() > 0.0);
        assert!(ours["error"]["max"]["error"].as_f64().is_some());
        assert!(cell["fma_peak_gflops"].as_f64().unwrap() > 0.0);
        // Not measured, and so not there.
        assert_eq!(cell["bandwidth_gbytes"], Value::Null);
    }
    assert!(report["environment"]["flashcore"].is_string());
}

#[test]
fn bench_lists_the_names_and_the_form_when_a_shape_is_unknown() {
    let output = answer(&["bench", "misson"]);
    assert_eq!(code(&output), 2);
    let text = stderr(&output);
    assert!(text.contains("'misson' is not a shape"), "{text}");
    assert!(text.contains("canonical_1") && text.contains("BxHxSxD"), "{text}");
}

#[test]
fn bench_refuses_options_that_mean_nothing() {
    for (arguments, word) in [
        (&["bench"][..], "required"),
        (&["bench", "tiny", "--dtype", "f9"], "bf16"),
        (&["bench", "tiny", "--threads", "0"], "threads"),
        (&["bench", "tiny", "--samples", "0"], "samples"),
        (&["bench", "tiny", "--budget", "-1"], "a time above 0"),
        (&["bench", "tiny", "--margin", "200"], "percentage"),
        (&["bench", "tiny", "--device", "tpu"], "cpu-portable"),
        (&["bench", "tiny", "--matrix", "cpu"], "cannot be used with"),
    ] {
        let output = answer(arguments);
        assert_eq!(code(&output), 2, "{arguments:?}");
        assert!(stderr(&output).contains(word), "{arguments:?}: {}", stderr(&output));
    }
}

/// A stand-in for Python: it has torch, and answers requests by a shell script.
#[cfg(unix)]
fn bench_with_peer(script: &str) -> (Output, Value) {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let python = place.path("python");
    let probe = "[ \"$1\" = -c ] && exit 0\n";
    std::fs::write(&python, format!("#!/bin/sh\n{probe}{script}")).unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let json = place.path("bench.json");
    let output = flashcore()
        .args(["bench", "tiny", "--samples", "6", "--threads", "1", "--json"])
        .arg(&json)
        .env("FLASHCORE_PYTHON", &python)
        .output()
        .unwrap();
    let report = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    (output, report)
}

#[cfg(unix)]
#[test]
fn a_peer_that_dies_or_babbles_or_fails_is_named_and_ours_is_timed_all_the_same() {
    let hello = "read line; echo '{\"torch\": \"9.9\", \"threads\": 1}'\n";
    for (script, word) in [
        ("exit 1".to_string(), "has ended"),
        ("read line; echo 'Segmentation fault'".to_string(), "no reply"),
        ("read line; echo '{\"error\": \"ImportError: libfoo\"}'".to_string(), "libfoo"),
        ("read line; echo '{\"torch\": \"9.9\", \"threads\": 64}'".to_string(), "64 threads"),
        (format!("{hello}read line; echo '{{\"error\": \"out of memory\"}}'"), "out of memory"),
        (
            format!("{hello}read line; echo '{{\"checksums\": {{\"q\": 1, \"k\": 2, \"v\": 3}}}}'"),
            "another q",
        ),
        (hello.to_string(), "has ended"),
    ] {
        let (output, report) = bench_with_peer(&script);
        assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
        assert!(stdout(&output).contains(word), "'{word}' is missing in {}", stdout(&output));
        assert_eq!(report["cells"][0]["results"][0]["samples_us"].as_array().unwrap().len(), 6);
        assert_eq!(report["cells"][0]["comparisons"].as_array().unwrap().len(), 0);
    }
}

#[test]
#[ignore = "needs a Python with torch: set FLASHCORE_PYTHON_WITH_TORCH to it"]
fn torch_is_timed_on_the_same_inputs_and_judged_by_the_same_rule() {
    let python = std::env::var("FLASHCORE_PYTHON_WITH_TORCH").expect("FLASHCORE_PYTHON_WITH_TORCH is set");
    let place = Place::new();
    let json = place.path("bench.json");
    let arguments =
        ["bench", "small", "2x4/2x33x24", "1x4/2x1/70x32", "--dtype", "all", "--samples", "6", "--causal"];
    let output = flashcore()
        .args(arguments)
        .arg("--json")
        .arg(&json)
        .env("FLASHCORE_PYTHON", python)
        .output()
        .unwrap();
    assert_ne!(code(&output), 1, "{}{}", stdout(&output), stderr(&output));
    let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    for cell in report["cells"].as_array().unwrap() {
        let torch = &cell["results"][1];
        assert_eq!(torch["name"], "torch");
        assert_eq!(torch["failure"], Value::Null);
        assert_eq!(torch["samples_us"].as_array().unwrap().len(), 6);
        // It computes the same problem: within a few times the error of plain attention.
        let error = &torch["error"]["max"];
        assert!(error["error"].as_f64().unwrap() <= 2.0 * error["allowed"].as_f64().unwrap(), "{cell}");
        assert!(cell["comparisons"][0]["speed_up"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(report["summaries"][0]["cells"], 9);
}
