//! Who was measured: what a contender is called in a report, and which colour, mark and dash it always has.

/// The number of colours; the last is shared by all contenders without one of their own.
pub const LOOKS: usize = 10;

/// The names in evidence files that have a label and a look of their own, in the order in which they are shown.
const KNOWN: [(&str, &str, usize); 9] = [
    ("flashcore", "FlashCore", 0),
    ("fa3", "FlashAttention-3", 6),
    ("cudnn", "cuDNN", 1),
    ("flash", "FlashAttention-2", 2),
    ("efficient", "memory-efficient", 3),
    ("math", "unfused", 4),
    ("cublas", "unfused on cuBLAS", 5),
    ("xformers", "xformers", 7),
    ("flex", "flex_attention", 8),
];

/// A name's place among those.
fn place(name: &str) -> Option<usize> {
    if name.starts_with("kernel ") || name.starts_with("cpu") {
        return Some(0);
    }
    KNOWN.iter().position(|(known, ..)| *known == name)
}

/// What a contender is called.
pub fn label(name: &str) -> String {
    match KNOWN.iter().find(|(known, ..)| *known == name) {
        Some((_, label, _)) => (*label).to_string(),
        None => name
            .strip_prefix("kernel ")
            .map_or_else(|| name.to_string(), |kernel| format!("FlashCore {kernel}")),
    }
}

/// Which colour, mark and dash it has. All of our kernels have the look of FlashCore.
pub fn look(name: &str) -> usize {
    place(name).map_or(LOOKS - 1, |place| KNOWN[place].2)
}

/// Where it stands in a list of contenders.
pub fn rank(name: &str) -> usize {
    place(name).unwrap_or(KNOWN.len())
}

/// Names in the order in which they are shown, each once.
pub fn sorted(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for name in names {
        if !all.contains(&name) {
            all.push(name);
        }
    }
    // Stable: those of one place stay in the order of the file.
    all.sort_by_key(|name| rank(name));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_come_first_and_strangers_last() {
        let names = ["xyz", "flash", "cudnn", "flashcore", "fa3", "flash", "kernel scalar"].map(String::from);
        assert_eq!(sorted(names.into_iter()), ["flashcore", "kernel scalar", "fa3", "cudnn", "flash", "xyz"]);
        assert_eq!(label("kernel sm90_fwd"), "FlashCore sm90_fwd");
        assert_eq!((label("xyz").as_str(), look("xyz")), ("xyz", LOOKS - 1));
    }
}
