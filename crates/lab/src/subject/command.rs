//! An external command as an engine: it reads q, k and v from one safetensors file, and writes o to another.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use flashcore::{Attention, DType, Problem, Tensor, TensorMut};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::failed;
use crate::engine::Engine;
use crate::faults::planted::write;
use crate::files;
use crate::guarded::Arrangement;
use crate::inputs::{Distribution, Values};
use crate::operands::Operands;
use crate::process::Group;

const NAME: &str = "command";

/// How many bytes from the end of a command's output are read.
const SAID: u64 = 1 << 16;

/// A command with placeholders for its file names and the problem's options.
pub struct CommandEngine {
    template: String,
    limit: Duration,
    deterministic: bool,
    gives_lse: bool,
    folder: tempfile::TempDir,
    calls: AtomicUsize,
}

/// What a command wrote.
struct Answer {
    o: Vec<f32>,
    lse: Option<Vec<f32>>,
}

impl CommandEngine {
    /// From a template in which `{in}` and `{out}` stand for files, and `{mask}`, `{scale}` and `{softcap}` for what is
    /// asked. The command is tried on a small problem at once, which also shows whether it gives lse.
    pub fn new(template: &str, limit: Duration, deterministic: bool) -> Result<Self, String> {
        if !template.contains("{in}") || !template.contains("{out}") {
            return Err(format!(
                "--command '{template}' needs {{in}} and {{out}} where the names of its files go, as in \
                 'python attention.py {{in}} {{out}}'"
            ));
        }
        let folder = tempfile::tempdir().map_err(|error| format!("no folder for files: {error}"))?;
        let calls = AtomicUsize::new(0);
        let mut engine =
            Self { template: template.into(), limit, deterministic, gives_lse: false, folder, calls };
        let problem = Problem::new(1, 1, 3, 8, DType::F32).with_lse();
        let operands = Operands::draw(problem, None, Arrangement::Bhsd, Distribution::Normal, 1);
        let (q, k, v) = (operands.q.view(), operands.k.view(), operands.v.view());
        let answer = engine.call(&problem, None, [&q, &k, &v])?;
        engine.gives_lse = answer.lse.is_some();
        Ok(engine)
    }

    /// Runs the command on one problem. Its files are removed again.
    fn call(
        &self,
        problem: &Problem,
        key_lengths: Option<&[u32]>,
        inputs: [&Tensor<'_>; 3],
    ) -> Result<Answer, String> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let path = |name: &str| self.folder.path().join(format!("{number}.{name}.safetensors"));
        let (input, output) = (path("in"), path("out"));
        std::fs::write(&input, file(problem, key_lengths, inputs)?)
            .map_err(|error| files::explain("write", &input, &error))?;
        let line = self
            .template
            .replace("{in}", &quoted(&input.to_string_lossy()))
            .replace("{out}", &quoted(&output.to_string_lossy()))
            .replace("{mask}", &quoted(&problem.mask.to_string().replace('∞', "inf")))
            .replace("{scale}", &problem.scale.to_string())
            .replace("{softcap}", &problem.softcap.unwrap_or(0.0).to_string());
        let answer = self.run_line(&line).and_then(|()| {
            if !output.is_file() {
                return Err("the command ended well, but its output cannot be read: there is no file".into());
            }
            let bytes = files::read(&output)
                .map_err(|why| format!("the command ended well, but its output cannot be read: {why}"))?;
            read(&bytes, problem)
        });
        let _ = std::fs::remove_file(&input);
        let _ = std::fs::remove_file(&output);
        answer
    }

    /// Runs a line of shell, but not longer than the limit.
    fn run_line(&self, line: &str) -> Result<(), String> {
        let errors =
            self.folder.path().join(format!("{}.errors", self.calls.fetch_add(1, Ordering::Relaxed)));
        let sink = File::create(&errors).map_err(|error| files::explain("write", &errors, &error))?;
        let mut shell = Command::new("sh");
        shell.args(["-c", line]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(sink);
        let mut group =
            Group::spawn(&mut shell).map_err(|error| format!("no shell to run the command: {error}"))?;
        let status = group.wait(self.limit).map_err(|error| format!("the command is lost: {error}"));
        // Any process that it left running is ended with it.
        drop(group);
        let said = end_of(&errors);
        let _ = std::fs::remove_file(&errors);
        match status?
            .ok_or_else(|| format!("the command did not end within {} s", self.limit.as_secs_f64()))?
        {
            status if status.success() => Ok(()),
            status => {
                let last =
                    said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("without a word");
                Err(format!("the command failed ({status}): {last}"))
            }
        }
    }
}

/// The end of a file's content, as text.
fn end_of(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|mut file| {
        let size = file.metadata()?.len();
        file.seek(SeekFrom::Start(size.saturating_sub(SAID)))?;
        file.take(SAID).read_to_end(&mut bytes)
    });
    read.map_or_else(|_| String::new(), |_| String::from_utf8_lossy(&bytes).into_owned())
}

/// A word that a shell takes literally.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Whether a command is asked about a problem, or why not.
pub(crate) fn supports(problem: &Problem) -> Result<(), String> {
    if problem.batch * problem.heads_q * problem.len_q * problem.len_k == 0 {
        return Err("a command is not asked about nothing".into());
    }
    if problem.is_eight_bit() {
        return Err("a command is asked about f16, bf16 and f32".into());
    }
    Ok(())
}

/// The input file: q, k and v as (batch, heads, length, head_dim), key lengths where there are any, and what else is
/// asked as metadata.
pub(crate) fn file(
    problem: &Problem,
    key_lengths: Option<&[u32]>,
    [q, k, v]: [&Tensor<'_>; 3],
) -> Result<Vec<u8>, String> {
    let values = Values { q: q.to_f32(), k: k.to_f32(), v: v.to_f32() };
    let operands = Operands::with_values(*problem, None, Arrangement::Bhsd, &values);
    let stored = match problem.dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
        DType::F8E4M3 => Dtype::F8_E4M3,
        DType::I32 => Dtype::I32,
    };
    let tensors = [("q", &operands.q), ("k", &operands.k), ("v", &operands.v)];
    let data = tensors.map(|(name, tensor)| (name, tensor.shape().to_vec(), tensor.bytes()));
    let views: Result<Vec<_>, safetensors::SafeTensorError> = data
        .iter()
        .map(|(name, shape, bytes)| Ok((*name, TensorView::new(stored, shape.clone(), bytes)?)))
        .collect();
    let mut views = views.map_err(|error| error.to_string())?;
    let lengths: Vec<u8> =
        key_lengths.unwrap_or_default().iter().flat_map(|&length| (length as i32).to_le_bytes()).collect();
    if key_lengths.is_some() {
        let view = TensorView::new(Dtype::I32, vec![problem.batch], &lengths);
        views.push(("key_lengths", view.map_err(|error| error.to_string())?));
    }
    let metadata = HashMap::from([
        ("mask".to_string(), problem.mask.to_string().replace('∞', "inf")),
        ("scale".to_string(), problem.scale.to_string()),
        ("softcap".to_string(), problem.softcap.unwrap_or(0.0).to_string()),
        ("lse".to_string(), problem.lse.to_string()),
        ("problem".to_string(), problem.to_string()),
    ]);
    safetensors::serialize(views, Some(metadata)).map_err(|error| error.to_string())
}

/// Reads o, and lse where it is there.
fn read(bytes: &[u8], problem: &Problem) -> Result<Answer, String> {
    let Problem { batch, heads_q, len_q, head_dim_v, dtype, .. } = *problem;
    let file =
        SafeTensors::deserialize(bytes).map_err(|error| format!("its output is no safetensors: {error}"))?;
    let o = file
        .tensor("o")
        .map_err(|_| format!("its output has no tensor o, but {}", files::contents(&file)))?;
    let expected = [batch, heads_q, len_q, head_dim_v];
    if files::dtype(o.dtype()) != Some(dtype) || o.shape() != expected {
        return Err(format!("its o is {:?} {:?}; {dtype} {expected:?} is asked for", o.dtype(), o.shape()));
    }
    let floats = |tensor: &TensorView<'_>| files::floats(tensor).unwrap_or_default();
    let lse = match file.tensor("lse") {
        Err(_) => None,
        Ok(lse)
            if lse.dtype() == Dtype::F32
                && lse.shape().iter().product::<usize>() == batch * heads_q * len_q =>
        {
            Some(floats(&lse))
        }
        Ok(lse) => {
            return Err(format!(
                "its lse is {:?} {:?}; F32 {:?} is asked for",
                lse.dtype(),
                lse.shape(),
                &expected[..3]
            ));
        }
    };
    Ok(Answer { o: floats(&o), lse })
}

impl Engine for CommandEngine {
    fn name(&self) -> &str {
        NAME
    }

    fn wish(&self) -> String {
        let unsteady = if self.deterministic { "" } else { " --nondeterministic" };
        format!("--command {}{unsteady}", quoted(&self.template))
    }

    fn gives_lse(&self) -> bool {
        self.gives_lse
    }

    fn hides_values(&self) -> bool {
        false
    }

    fn deterministic(&self) -> bool {
        self.deterministic
    }

    fn supports(&self, problem: &Problem) -> Result<(), String> {
        supports(problem)
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        inputs: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let mut problem = attention.problem(inputs[0], inputs[1], inputs[2])?;
        problem.lse = lse.is_some();
        let answer =
            self.call(&problem, attention.host_key_lengths(), inputs).map_err(|why| failed(NAME, why))?;
        write(&answer.o, o);
        match (lse, answer.lse) {
            (Some(lse), Some(values)) => write(&values, lse),
            (Some(_), None) => return Err(failed(NAME, "it gave lse before and does not now")),
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_needs_places_for_its_files() {
        let why = CommandEngine::new("cat {in}", Duration::from_secs(1), true).err().unwrap();
        assert!(why.contains("{out}"), "{why}");
    }

    #[cfg(unix)]
    #[test]
    fn a_command_that_fails_hangs_or_writes_nothing_is_refused_in_words() {
        let within = |limit: Duration, template: &str| {
            CommandEngine::new(template, limit, true).err().unwrap_or_default()
        };
        // However busy the machine is.
        let of = |template: &str| within(Duration::from_mins(10), template);
        assert!(of("echo no room >&2; : {in} {out}; exit 3").contains("no room"));
        assert!(within(Duration::from_millis(500), ": {in} {out}; sleep 100").contains("did not end"));
        assert!(of(": {in} {out}").contains("cannot be read"));
        assert!(of("echo nonsense > {out}; : {in}").contains("no safetensors"));
        assert!(of("cp {in} {out}").contains("no tensor o"));
    }

    #[test]
    fn words_are_quoted_for_the_shell() {
        assert_eq!(quoted("it's"), "'it'\\''s'");
    }
}
