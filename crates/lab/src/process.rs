//! A worker: a process of its own that answers requests, one line of JSON each.
//!
//! Whatever computes on a GPU, ours or a peer's, runs in one: it may crash or hang, and then it costs its own result
//! and nobody else's.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

/// Why a worker gave no answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Silence {
    /// It said what went wrong, and can be asked again.
    Refused(String),
    /// It is gone or must be taken for it; it is not asked again.
    Lost(String),
}

impl Silence {
    /// What to tell a person.
    pub fn reason(self) -> String {
        match self {
            Silence::Refused(why) | Silence::Lost(why) => why,
        }
    }
}

/// A process that answers requests.
#[derive(Debug)]
pub struct Worker {
    name: &'static str,
    child: Child,
    requests: Option<ChildStdin>,
    replies: Receiver<String>,
}

impl Worker {
    /// Starts one. `name` stands in messages.
    pub fn start(name: &'static str, command: &mut Command) -> Result<Self, String> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("{} does not start: {error}", command.get_program().display()))?;
        let requests = child.stdin.take();
        let output = child.stdout.take().expect("stdout is piped");
        let (sender, replies) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { name, child, requests, replies })
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
        let reply: Value =
            serde_json::from_str(&line).map_err(|error| lost(format!("sent what is no reply ({error})")))?;
        match reply.get("error").and_then(Value::as_str) {
            Some(why) => Err(Silence::Refused(why.to_string())),
            None => Ok(reply),
        }
    }

    /// The exit status, for a process that closed its output and so is about to end.
    fn how_it_ended(&mut self) -> String {
        for _ in 0..50 {
            if let Ok(Some(status)) = self.child.try_wait() {
                return if status.success() { String::new() } else { format!(" ({status})") };
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        String::new()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Without input it ends; should it hang, it is ended.
        drop(self.requests.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use serde_json::json;

    /// However busy the machine is.
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

    #[test]
    fn a_worker_that_hangs_or_babbles_is_lost() {
        let mut worker = shell("sleep 100");
        let Err(Silence::Lost(why)) = worker.ask(&json!({}), Duration::from_millis(50)) else { panic!() };
        assert!(why.contains("did not answer"), "{why}");
        let mut worker = shell("read line; echo 'Segmentation fault'; sleep 100");
        assert!(matches!(worker.ask(&json!({}), SOON), Err(Silence::Lost(why)) if why.contains("no reply")));
    }
}
