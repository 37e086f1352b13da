//! Memory: how much a problem takes and how much there is, asked before anything is drawn. A machine that runs out of
//! memory may kill any process.

use std::path::Path;

use flashcore::Problem;

/// The least memory, in bytes, for drawing a problem's inputs, calling an engine and judging its result.
pub fn to_judge(problem: &Problem) -> u128 {
    let [q, k, v, o] = elements(problem);
    let inputs = q + k + v;
    let size = problem.dtype.size() as u128;
    // The oracle widens the keys and values of a head for every thread.
    let rows = size_of_all(&[problem.batch, problem.heads_q, problem.len_q]);
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u128;
    let head = size_of_all(&[problem.len_k, problem.head_dim + problem.head_dim_v, size_of::<f32>()]);
    // One after the other: inputs as they are drawn, in f32; the oracle's heads; the output and its values in f32.
    let widest = (4 * inputs).max(rows.min(threads) * head + of_rows(problem)).max(o * (size + 4));
    inputs * size + widest
}

/// The least memory, in bytes, for the truth about one row per head, which is what is judged in the largest problems.
pub fn of_rows(problem: &Problem) -> u128 {
    512 * size_of_all(&[problem.batch, problem.heads_q])
}

/// Bytes that a problem's inputs and its output, with a copy of it, take.
pub fn to_call(problem: &Problem) -> u128 {
    let [q, k, v, o] = elements(problem);
    (q + k + v + 2 * o) * problem.dtype.size() as u128
}

/// Elements of q, k, v and o.
fn elements(problem: &Problem) -> [u128; 4] {
    let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, .. } = *problem;
    [
        size_of_all(&[batch, heads_q, len_q, head_dim]),
        size_of_all(&[batch, heads_kv, len_k, head_dim]),
        size_of_all(&[batch, heads_kv, len_k, head_dim_v]),
        size_of_all(&[batch, heads_q, len_q, head_dim_v]),
    ]
}

/// A product of sizes; where it overflows, a number far beyond any machine's memory, but small enough that sums of a
/// few do not overflow.
fn size_of_all(sizes: &[usize]) -> u128 {
    sizes.iter().fold(1, |product: u128, &size| product.saturating_mul(size as u128)).min(1 << 100)
}

/// Refuses what needs more memory than there is.
pub fn check(what: &impl std::fmt::Display, needed: u128) -> Result<(), String> {
    match available() {
        Some(free) if needed > u128::from(free) => Err(format!(
            "{what} needs {} of memory here, and {} can be had; choose a smaller problem, or another machine",
            bytes(needed),
            bytes(u128::from(free))
        )),
        _ => Ok(()),
    }
}

/// A number of bytes for people.
fn bytes(count: u128) -> String {
    let units = ["bytes", "kB", "MB", "GB", "TB", "PB", "EB"];
    let (mut number, mut unit) = (count as f64, 0);
    while number >= 1000.0 && unit + 1 < units.len() {
        (number, unit) = (number / 1000.0, unit + 1);
    }
    if unit == 0 { format!("{count} bytes") } else { format!("{number:.1} {}", units[unit]) }
}

/// Bytes that this process can still get, by the machine, its control group and its own limit. Absent where unknown.
pub fn available() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let of_machine = read("/proc/meminfo").and_then(|text| {
        let field = |name| kilobytes(&text, name);
        Some(field("MemAvailable")? + field("SwapFree").unwrap_or(0))
    });
    let of_group = read("/proc/self/cgroup").and_then(|text| {
        let path = text.lines().find_map(|line| line.strip_prefix("0::"))?.to_string();
        // Each group up to the root may have a limit of its own.
        let groups = Path::new(&path).ancestors().map(|group| format!("/sys/fs/cgroup{}", group.display()));
        groups.filter_map(|group| free_of_group(&|file| read(&format!("{group}/{file}")))).min()
    });
    let of_process = read("/proc/self/limits").zip(read("/proc/self/status")).and_then(|(limits, status)| {
        let most = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
        let most: u64 = most.split_whitespace().next()?.parse().ok()?;
        Some(most.saturating_sub(kilobytes(&status, "VmSize")?))
    });
    [of_machine, of_group, of_process].into_iter().flatten().min()
}

/// What a control group's limit leaves, if it has one. Memory that caches files counts as free.
fn free_of_group(read: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
    let number = |file: &str| read(file)?.trim().parse::<u64>().ok();
    let stat = read("memory.stat").unwrap_or_default();
    let caches = |name: &str| {
        let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|number| number.parse::<u64>().ok()).unwrap_or(0)
    };
    let kept = number("memory.current")?.saturating_sub(caches("inactive_file") + caches("active_file"));
    Some(number("memory.max")?.saturating_sub(kept))
}

/// A field of a file in /proc that counts kilobytes, in bytes.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::DType;

    #[test]
    fn what_no_machine_has_is_refused_with_both_numbers_and_what_is_usual_is_not() {
        let huge = Problem::new(1, 1, 1_000_000_000, 64, DType::F16);
        let why = check(&huge, to_judge(&huge)).err();
        if cfg!(target_os = "linux") {
            let why = why.unwrap();
            assert!(
                why.contains("1x1x1000000000x64 f16 needs ")
                    && why.contains(" TB of memory")
                    && why.contains("can be had"),
                "{why}"
            );
        }
        let mission = Problem::new(1, 8, 512, 64, DType::F16);
        assert_eq!(check(&mission, to_judge(&mission)), Ok(()));
        assert!(to_call(&mission) < to_judge(&mission));
    }

    #[test]
    fn sizes_whose_product_no_integer_holds_are_far_too_large() {
        let endless = Problem::new(usize::MAX, usize::MAX, usize::MAX, 1024, DType::F32);
        assert!(to_judge(&endless) > 1 << 100 && to_call(&endless) > 1 << 100);
    }

    #[test]
    fn a_control_group_leaves_its_limit_less_what_cannot_be_given_back() {
        let group = |max: &'static str| {
            move |file: &str| match file {
                "memory.max" => Some(format!("{max}\n")),
                "memory.current" => Some("700\n".into()),
                "memory.stat" => Some("anon 400\nactive_file 100\ninactive_file 200\n".into()),
                _ => None,
            }
        };
        assert_eq!(free_of_group(&group("1000")), Some(600));
        assert_eq!(free_of_group(&group("max")), None);
        assert_eq!(free_of_group(&|_| None), None);
    }

    #[test]
    fn bytes_are_said_in_the_unit_that_fits() {
        assert_eq!(bytes(12), "12 bytes");
        assert_eq!(bytes(1_500_000), "1.5 MB");
        assert_eq!(bytes(1 << 100), "1267650600228.2 EB");
    }
}
