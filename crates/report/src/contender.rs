//! Who was measured: what a contender is called in a report, and which colour, mark and dash it always has.

/// The number of colours; the last is shared by all contenders without one of their own.
pub const LOOKS: usize = 10;

/// The names in evidence files that have a look and a label of their own, in the order in which they are shown.
const KNOWN: [(&str, &str); 9] = [
    ("flashcore", "FlashCore"),
    ("cudnn", "cuDNN"),
    ("flash", "FlashAttention-2"),
    ("efficient", "memory-efficient"),
    ("math", "unfused"),
    ("cublas", "unfused on cuBLAS"),
    ("flash_attn", "flash_attn"),
    ("xformers", "xformers"),
    ("flex", "flex_attention"),
];

/// What a contender is called.
pub fn label(name: &str) -> String {
    match KNOWN.iter().find(|(known, _)| *known == name) {
        Some((_, label)) => (*label).to_string(),
        None => name
            .strip_prefix("kernel ")
            .map_or_else(|| name.to_string(), |kernel| format!("FlashCore {kernel}")),
    }
}

/// Which colour, mark and dash it has. All of our kernels have the look of FlashCore.
pub fn look(name: &str) -> usize {
    if name.starts_with("kernel ") || name.starts_with("cpu") {
        return 0;
    }
    KNOWN.iter().position(|(known, _)| *known == name).unwrap_or(LOOKS - 1)
}

/// Names in the order in which they are shown, each once.
pub fn sorted(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for name in names {
        if !all.contains(&name) {
            all.push(name);
        }
    }
    // Stable: those of one look stay in the order of the file.
    all.sort_by_key(|name| look(name));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_come_first_and_strangers_last() {
        let names = ["xyz", "flash", "cudnn", "flashcore", "flash", "kernel scalar"].map(String::from);
        assert_eq!(sorted(names.into_iter()), ["flashcore", "kernel scalar", "cudnn", "flash", "xyz"]);
        assert_eq!(label("kernel sm90_fwd"), "FlashCore sm90_fwd");
        assert_eq!((label("xyz").as_str(), look("xyz")), ("xyz", LOOKS - 1));
    }
}
