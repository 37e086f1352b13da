//! Processes that are started here: a [`Group`] ends with all that it started, and a [`Worker`] is a group that answers
//! requests, one line of JSON each.
//!
//! Whatever computes on a GPU, ours or a peer's, runs in a worker: it may crash or hang, and then it costs only its own
//! result.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use crate::interrupt::lock_soon;

/// Why a worker gave no answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Silence {
    /// It said what went wrong, and can be asked again.
    Refused(String),
    /// It is gone or must be treated as gone; it is not asked again.
    Lost(String),
}

impl Silence {
    /// The message for the user.
    pub fn reason(self) -> String {
        match self {
            Silence::Refused(why) | Silence::Lost(why) => why,
        }
    }
}

/// The running groups.
static GROUPS: Mutex<Vec<u32>> = Mutex::new(Vec::new());

fn groups() -> MutexGuard<'static, Vec<u32>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends every group, and prevents new ones: for a process that is about to end.
pub(crate) fn end_all() {
    let groups = lock_soon(&GROUPS);
    groups.iter().flat_map(|groups| groups.iter()).for_each(|&id| kill_group(id));
    // Held until the process is gone, so that nothing starts after this.
    std::mem::forget(groups);
}

#[cfg(unix)]
fn kill_group(id: u32) {
    use nix::sys::signal::{Signal, killpg};
    // A group that has ended already cannot be killed, and need not.
    let _ = killpg(nix::unistd::Pid::from_raw(id as i32), Signal::SIGKILL);
}

#[cfg(not(unix))]
fn kill_group(_: u32) {}

/// A process together with all that it starts: it ends as a whole, when this is dropped, when the command ends, and (on
/// Unix) when the command is killed.
#[derive(Debug)]
pub struct Group {
    child: Child,
    /// The group's leader, which waits for the end of its input, which comes when this process ends, and then kills the group.
    /// It is there before the command is, so that the command never runs without it.
    leash: Option<Child>,
}

impl Group {
    /// Starts a command in a group of its own.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        let mut groups = groups();
        let mut leash = leash();
        #[cfg(unix)]
        {
            let leader = leash.as_ref().map_or(0, |leash| leash.id() as i32);
            std::os::unix::process::CommandExt::process_group(command, leader);
        }
        let child = command.spawn().inspect_err(|_| end(&mut leash))?;
        let group = Self { child, leash };
        groups.push(group.id());
        Ok(group)
    }

    /// The group's number: that of its leader.
    fn id(&self) -> u32 {
        self.leash.as_ref().unwrap_or(&self.child).id()
    }

    /// The process itself.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Waits for the process, but not longer than `limit`; none if it still runs then. The rest of the group goes on.
    pub fn wait(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let started = Instant::now();
        loop {
            match self.child.try_wait()? {
                None if started.elapsed() < limit => std::thread::sleep(TICK),
                ended => return Ok(ended),
            }
        }
    }

    /// Runs a command to its end, and gives what it said.
    pub fn output(command: &mut Command) -> io::Result<Output> {
        let mut group =
            Self::spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()))?;
        let (mut out, mut err) = (group.child.stdout.take(), group.child.stderr.take());
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        // Both are read at once: a process that fills one pipe while the other is waited for would wait forever.
        std::thread::scope(|scope| {
            scope.spawn(|| err.as_mut().map(|err| err.read_to_end(&mut stderr)));
            out.as_mut().map_or(Ok(0), |out| out.read_to_end(&mut stdout))
        })?;
        Ok(Output { status: group.child.wait()?, stdout, stderr })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let id = self.id();
        kill_group(id);
        let _ = self.child.kill();
        let _ = self.child.wait();
        end(&mut self.leash);
        groups().retain(|&other| other != id);
    }
}

/// The leader of a new group, which ends it when this process is gone, however it went. Without a shell there is none, and
/// the command leads.
#[cfg(unix)]
fn leash() -> Option<Child> {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new("sh");
    command.args(["-c", "read -r end; kill -s KILL 0"]).process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()
}

#[cfg(not(unix))]
fn leash() -> Option<Child> {
    None
}

fn end(leash: &mut Option<Child>) {
    if let Some(leash) = leash {
        let _ = leash.kill();
        let _ = leash.wait();
    }
}

/// How often a running process is polled.
const TICK: Duration = Duration::from_millis(2);

/// The most bytes of a reply's line: more is not a reply.
const LONGEST_LINE: u64 = 64 << 20;

/// The most unread replies, so that a worker that writes without end waits rather than filling the memory.
const WAITING: usize = 16;

/// A process that answers requests.
#[derive(Debug)]
pub struct Worker {
    name: &'static str,
    group: Group,
    requests: Option<ChildStdin>,
    replies: Receiver<Vec<u8>>,
}

impl Worker {
    /// Starts one. `name` is used in messages.
    pub fn start(name: &'static str, command: &mut Command) -> Result<Self, String> {
        let mut group =
            Group::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()))
                .map_err(|error| format!("{} does not start: {error}", command.get_program().display()))?;
        let requests = group.child.stdin.take();
        let output = group.child.stdout.take().expect("stdout is piped");
        let (sender, replies) = sync_channel(WAITING);
        std::thread::spawn(move || {
            let mut output = BufReader::new(output);
            loop {
                let mut line = Vec::new();
                let read = output.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line);
                if !read.is_ok_and(|bytes| bytes > 0) || sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { name, group, requests, replies })
    }

    /// Sends a request and waits for its reply, but not longer than `limit`.
    pub fn ask(&mut self, request: &impl Serialize, limit: Duration) -> Result<Value, Silence> {
        let name = self.name;
        let lost = |why: String| Silence::Lost(format!("the {name} {why}"));
        let line = serde_json::to_string(request).map_err(|error| Silence::Refused(error.to_string()))?;
        let requests = self.requests.as_mut().ok_or_else(|| lost("has ended".into()))?;
        writeln!(requests, "{line}")
            .and_then(|()| requests.flush())
            .map_err(|error| lost(format!("has ended ({error})")))?;
        let line = self.replies.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => lost(format!("did not answer within {} s", limit.as_secs())),
            RecvTimeoutError::Disconnected => lost(format!("has ended{}", self.how_it_ended())),
        })?;
        let reply: Value = serde_json::from_slice(&line)
            .map_err(|error| lost(format!("sent what is no reply ({error})")))?;
        match reply.get("error").and_then(Value::as_str) {
            Some(why) => Err(Silence::Refused(why.to_string())),
            None => Ok(reply),
        }
    }

    /// The exit status, for a process that closed its output and so is about to end.
    fn how_it_ended(&mut self) -> String {
        match self.group.wait(Duration::from_millis(500)) {
            Ok(Some(status)) if !status.success() => format!(" ({status})"),
            _ => String::new(),
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use serde_json::json;

    /// Long enough for any busy machine.
    const SOON: Duration = Duration::from_mins(10);

    fn shell(script: &str) -> Worker {
        Worker::start("test worker", Command::new("sh").args(["-c", script])).unwrap()
    }

    #[test]
    fn a_reply_is_what_the_worker_wrote() {
        let mut worker = shell("read line; echo '{\"a\": 1}'; read line; echo \"{\\\"got\\\": $line}\"");
        assert_eq!(worker.ask(&json!({}), SOON), Ok(json!({"a": 1})));
        assert_eq!(worker.ask(&json!([7]), SOON), Ok(json!({"got": [7]})));
    }

    #[test]
    fn an_error_can_be_asked_past_and_an_end_cannot() {
        let mut worker = shell("read line; echo '{\"error\": \"no room\"}'; read line; exit 3");
        assert_eq!(worker.ask(&json!({}), SOON), Err(Silence::Refused("no room".into())));
        let Err(Silence::Lost(why)) = worker.ask(&json!({}), SOON) else { panic!("it ended") };
        assert!(why.contains("test worker has ended") && why.contains('3'), "{why}");
    }

    /// A process that a shell wrote the number of, once it is there.
    fn number(path: &std::path::Path) -> i32 {
        loop {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            if let Some(number) = text.strip_suffix('\n') {
                return number.parse().unwrap();
            }
            std::thread::sleep(TICK);
        }
    }

    fn runs(process: i32) -> bool {
        // A killed process stays a zombie until its new parent waits for it.
        let state = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        state.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_group_ends_with_all_that_it_started() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("number");
        let script = format!("sh -c 'sleep 1000 & echo $! > {}; wait' & wait", path.display());
        let mut group = Group::spawn(Command::new("sh").args(["-c", &script])).unwrap();
        let grandchild = number(&path);
        assert!(runs(grandchild));
        assert_eq!(group.wait(Duration::from_millis(10)).unwrap(), None);
        drop(group);
        while runs(grandchild) {
            std::thread::sleep(TICK);
        }
    }

    #[test]
    fn all_that_a_process_says_is_heard_also_where_it_fills_both_pipes() {
        let script = "i=0; while [ $i -lt 3000 ]; do echo out$i; echo a-longer-line-for-the-errors$i >&2; \
                      i=$((i+1)); done; exit 3";
        let output = Group::output(Command::new("sh").args(["-c", script])).unwrap();
        assert_eq!(output.status.code(), Some(3));
        assert!(output.stdout.ends_with(b"out2999\n") && output.stderr.ends_with(b"errors2999\n"));
    }

    #[test]
    fn a_worker_that_hangs_or_babbles_is_lost() {
        let mut worker = shell("sleep 100");
        let Err(Silence::Lost(why)) = worker.ask(&json!({}), Duration::from_millis(50)) else { panic!() };
        assert!(why.contains("did not answer"), "{why}");
        let mut worker = shell("read line; echo 'Segmentation fault'; sleep 100");
        assert!(matches!(worker.ask(&json!({}), SOON), Err(Silence::Lost(why)) if why.contains("no reply")));
        let mut worker = shell("read line; exec cat /dev/zero");
        assert!(matches!(worker.ask(&json!({}), SOON), Err(Silence::Lost(why)) if why.contains("no reply")));
    }
}
