//! Tells the binary which commit it was built from, so that its reports can say so. Absent outside a checkout.

use std::process::Command;

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
}

fn main() {
    // The binary's sources: as long as none of them changes, the last answer stands.
    for path in ["..", "../../cases", "../../Cargo.lock"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let Some(commit) = git(&["rev-parse", "HEAD"]) else { return };
    let branch = git(&["symbolic-ref", "-q", "HEAD"]);
    for name in ["HEAD"].into_iter().chain(branch.as_deref()) {
        if let Some(path) =
            git(&["rev-parse", "--git-path", name]).filter(|path| std::path::Path::new(path).exists())
        {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    println!("cargo::rustc-env=FLASHCORE_COMMIT={commit}");
    if let Some(changes) = git(&["status", "--porcelain", "--", "..", "../../cases"]) {
        println!("cargo::rustc-env=FLASHCORE_DIRTY={}", !changes.is_empty());
    }
}
