//! PTX that somebody has damaged: text and modules with random changes are read, checked, decoded and simulated. Each step
//! refuses with words or goes on; none panics, and none goes on for ever.
//!
//! The changes are the same in every run. `FLASHCORE_FUZZ=100 cargo test --release -p flashcore --test text_fuzz`
//! makes a hundred times as many.
#![cfg(feature = "cuda")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use flashcore::plan::choose::default_schedule;
use flashcore_kernels::{ElementType, Kernel as Family, Spec};
use flashcore_ptx::*;
use flashcore_sim::{AsyncMode, Config, LaunchDims, Sim, Swizzle, TensorElement};

/// A stream of numbers (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}

/// How often everything is tried, for the number of a usual run.
fn rounds(usual: usize) -> usize {
    let times = std::env::var("FLASHCORE_FUZZ").ok().and_then(|times| times.parse().ok());
    usual * times.unwrap_or(1)
}

/// A kernel with something of everything that the reader reads.
const PLAIN: &str = "\
.version 7.8
.target sm_80
.address_size 64
.visible .entry test(.param .u64 .ptr .global .align 16 x, .param .u64 y, .param .u32 n, .param .f32 scale)
.reqntid 64, 1, 1
{
    .reg .pred %p<4>;
    .reg .b16 %h<4>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<8>;
    .reg .f32 %f<8>;
    .shared .align 16 .b8 tile[1024];
    .shared .f32 sums[2];
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y+0];
    ld.param.u32 %r1, [n];
    ld.param.f32 %f1, [scale];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, tile;
    mad.lo.u32 %r4, %r2, 16, %r3;
    mul.wide.u32 %rd3, %r2, 16;
    add.u64 %rd4, %rd1, %rd3;
    ld.global.nc.v4.u32 {%r5, %r6, %r7, %r8}, [%rd4];
    st.shared.v4.b32 [%r4], {%r5, %r6, %r7, 0x3F800000};
    bar.sync 0;
    ld.shared.v2.f32 {%f2, %f3}, [%r4+8];
    mul.f32 %f2, %f2, %f1;
    fma.rn.f32 %f3, %f3, 0f3F000000, %f2;
    ex2.approx.ftz.f32 %f3, %f3;
    cvt.rn.f16.f32 %h1, %f3;
    mov.b32 %r9, {%h1, %h1};
    mov.b32 {%h2, _}, %r9;
    mov.u32 %r10, 0;
    setp.ge.s32 %p1, %r10, %r1;
    @%p1 bra $end;
$again:
    shfl.sync.bfly.b32 %r11|%p2, %r9, 1, 31, -1;
    xor.b32 %r9, %r9, %r11;
    add.s32 %r10, %r10, 1;
    setp.lt.s32 %p3, %r10, 5;
    @!%p3 bra.uni $end;
    setp.eq.b32 %p2, %r2, %r10;
    @%p2 bra $again;
    setp.lt.s32 %p1, %r10, %r1;
    @%p1 bra $again;
$end:
    st.global.b16 [%rd4+-2], %h2;
    add.s64 %rd5, %rd2, %rd3;
    st.global.v2.u32 [%rd5], {%r9, %r10};
    st.shared.f32 [sums+4], %f3;
    ret;
}
";

/// Words that a mutation puts in.
const WORDS: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ";",
    ",",
    ":",
    "@",
    "@!",
    "|",
    "<",
    ">",
    "+",
    "-",
    ".",
    "..",
    "_",
    "$",
    "%",
    "//",
    "/*",
    "*/",
    "::",
    "0",
    "-1",
    "1e9",
    "0x",
    "0f",
    "0f3F8",
    "0d",
    "08",
    "4294967295",
    "4294967296",
    "18446744073709551616",
    "2147483648",
    "1.5",
    "1.5e+",
    "%tid.x",
    "%clock64",
    "%r1",
    "%rd1",
    "%p1",
    "%f1",
    "%h1",
    "ret",
    "bra",
    "cvta",
    "mov",
    "mov.b32",
    "ld.global.nc.u32",
    "st.shared.u32",
    "bar.sync",
    ".reg",
    ".shared",
    ".align",
    ".entry",
    ".visible",
    ".param",
    ".b8",
    "{%r1, %r2}",
    "[%rd1+-4]",
    "$end",
    "$end:",
    "tile",
    "x",
    "é",
    "😀",
    "\0",
    "\u{b}",
    "\r",
    "\n",
];

/// A text with a few random changes.
fn damaged(random: &mut Random, text: &str) -> String {
    let mut text = text.to_owned();
    for _ in 0..=random.below(3) {
        text = if random.below(4) == 0 { with_noise(random, &text) } else { with_other_words(random, &text) };
    }
    text
}

/// Words deleted, doubled, exchanged or replaced.
fn with_other_words(random: &mut Random, text: &str) -> String {
    let kind = |c: char| match c {
        c if c.is_ascii_alphanumeric() || "_$%.".contains(c) => 0,
        ' ' => 1,
        _ => 2,
    };
    let mut words: Vec<String> = Vec::new();
    let mut last = 2;
    for c in text.chars() {
        let now = kind(c);
        match words.last_mut() {
            Some(word) if now == last && now != 2 => word.push(c),
            _ => words.push(c.to_string()),
        }
        last = now;
    }
    if words.is_empty() {
        return String::new();
    }
    let at = random.below(words.len());
    match random.below(6) {
        0 => drop(words.remove(at)),
        1 => words.insert(at, words[at].clone()),
        2 => {
            let other = random.below(words.len());
            words.swap(at, other);
        }
        3 => (*random.of(WORDS)).clone_into(&mut words[at]),
        4 => words.insert(at, format!(" {} ", random.of(WORDS))),
        _ => {
            // A number becomes another one, or a register another one.
            let digits = |word: &String| word.ends_with(|c: char| c.is_ascii_digit());
            let numbers: Vec<usize> = (0..words.len()).filter(|&at| digits(&words[at])).collect();
            if !numbers.is_empty() {
                let at = *random.of(&numbers);
                let other = match random.below(3) {
                    0 => random.next().to_string(),
                    1 => random.below(20).to_string(),
                    _ => format!("{:x}", random.next()),
                };
                let stem = words[at].trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
                words[at] = stem + &other;
            }
        }
    }
    words.concat()
}

/// Bytes changed, lines deleted, doubled or exchanged, or the end cut off.
fn with_noise(random: &mut Random, text: &str) -> String {
    let mut lines: Vec<&str> = text.lines().collect();
    match random.below(5) {
        0 => {
            let mut bytes = text.as_bytes().to_vec();
            for _ in 0..=random.below(4) {
                if !bytes.is_empty() {
                    let at = random.below(bytes.len());
                    bytes[at] = random.next() as u8;
                }
            }
            return String::from_utf8_lossy(&bytes).into_owned();
        }
        1 => {
            let bytes = &text.as_bytes()[..random.below(text.len() + 1)];
            return String::from_utf8_lossy(bytes).into_owned();
        }
        _ if lines.is_empty() => {}
        2 => drop(lines.remove(random.below(lines.len()))),
        3 => {
            let line = *random.of(&lines);
            lines.insert(random.below(lines.len()), line);
        }
        _ => {
            let (a, b) = (random.below(lines.len()), random.below(lines.len()));
            lines.swap(a, b);
        }
    }
    lines.join("\n")
}

/// Launches a kernel on small buffers with any parameters, within a small budget. What it says does not matter.
fn simulate(random: &mut Random, module: &Module) {
    let kernel = &module.kernels[random.below(module.kernels.len())];
    let async_mode =
        *random.of(&[AsyncMode::Late, AsyncMode::Early, AsyncMode::Random(1), AsyncMode::Random(2)]);
    let seed = random.below(3) as u64;
    let config =
        Config { async_mode, seed, threads: 1, budget: 30_000, max_findings: 20, ..Config::default() };
    let mut sim = Sim::new(config);
    let sizes = [64, 1024, 8192];
    let buffers: Vec<_> =
        (0..4).map(|n| sim.alloc_from(&format!("buffer {n}"), &vec![1; *random.of(&sizes)])).collect();
    let mut params = vec![0; kernel.param_bytes() as usize];
    for param in &kernel.params {
        let address = random.of(&buffers).address;
        let bytes: Vec<u8> = match param.ty {
            ParamType::U64 | ParamType::S64 | ParamType::GlobalPtr => address.to_le_bytes().to_vec(),
            ParamType::F32 => 0.5_f32.to_le_bytes().to_vec(),
            ParamType::U32 | ParamType::S32 => {
                let number = *random.of(&[0, 1, 2, 3, 7, 64, 65, u32::MAX]);
                number.to_le_bytes().to_vec()
            }
            ParamType::TensorMap => {
                let map = flashcore_sim::TensorMap::new(
                    TensorElement::F16,
                    address,
                    &[64, 16, 2, 1],
                    &[128, 2048, 4096],
                    &[64, 16, 1, 1],
                );
                map.swizzled(Swizzle::B128).encode().map_or_else(|_| vec![0; 128], |bytes| bytes.to_vec())
            }
        };
        params[param.offset as usize..][..bytes.len()].copy_from_slice(&bytes);
    }
    let block = match kernel.threads {
        Some(Threads::Exactly(block) | Threads::AtMost(block)) => block,
        None => *random.of(&[[32, 1, 1], [33, 1, 1], [8, 4, 2], [1, 1, 1]]),
    };
    let cluster = kernel.cluster.unwrap_or([1; 3]);
    let dims = LaunchDims {
        grid: [cluster[0] * (1 + random.below(2) as u32), cluster[1], cluster[2]],
        block,
        cluster: None,
        dynamic_shared: None,
    };
    let _ = sim.launch(module, &kernel.name, dims, &params).map_err(|error| error.to_string());
}

/// Does a step, and names what it was done to where it panics.
fn without_panic<T>(what: impl Fn() -> String, step: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|_| panic!("a panic on\n{}", what()))
}

/// Every family's kernel for a small and for an unusual problem.
fn emitted() -> Vec<Module> {
    let specs = [
        Spec::new(ElementType::F16, 64).causal().with_lse(),
        Spec { softcap: true, key_lengths: true, grouped: true, ..Spec::new(ElementType::Bf16, 64) },
    ];
    let mut modules = Vec::new();
    for target in [Target::Sm80, Target::Sm90a] {
        for family in Family::LADDER.into_iter().filter(|family| family.runs_on(target)) {
            for spec in &specs {
                if let Ok(schedule) = default_schedule(family, spec, target) {
                    modules.push(schedule.emit(spec, target).expect("a default schedule is emitted"));
                }
            }
        }
    }
    modules
}

#[test]
fn damaged_text_is_read_or_refused_with_its_line_and_what_is_read_runs() {
    let mut random = Random(1);
    let (mut read, mut refused) = (0, 0);
    assert!(flashcore_ptx::read::module(PLAIN).is_ok());
    for _ in 0..rounds(10_000) {
        let text = damaged(&mut random, PLAIN);
        match without_panic(|| text.clone(), || flashcore_ptx::read::module(&text)) {
            Ok(module) => {
                read += 1;
                // Reading is quicker than running.
                if read % 4 == 0 {
                    let again = Random(random.0);
                    without_panic(|| text.clone(), || simulate(&mut Random(again.0), &module));
                }
            }
            Err(error) => {
                refused += 1;
                let error = error.to_string();
                assert!(error.contains("line ") || error.contains("kernel `"), "{error}");
            }
        }
    }
    assert!(read * 25 > refused, "{read} of {} are read: the changes test little", read + refused);
}

#[test]
fn damaged_text_of_our_own_kernels_is_refused_in_words() {
    let mut random = Random(2);
    for module in emitted() {
        let text = module.to_string();
        for _ in 0..rounds(8) {
            let text = damaged(&mut random, &text);
            let read = without_panic(|| text.clone(), || flashcore_ptx::read::module(&text));
            assert!(read.is_err_and(|error| error.to_string().contains("line ")));
        }
    }
}

/// A module with a few random changes to one kernel.
fn damaged_module(random: &mut Random, module: &Module) -> Module {
    let mut module = module.clone();
    let kernel = &mut module.kernels[0];
    for _ in 0..=random.below(3) {
        let len = kernel.body.len();
        let (at, other) = (random.below(len), random.below(len));
        match random.below(7) {
            0 => drop(kernel.body.remove(at)),
            1 => {
                let inst = kernel.body[at].clone();
                kernel.body.insert(other, inst);
            }
            2 => kernel.body.swap(at, other),
            3 => {
                let guard = kernel.body[other].guard;
                kernel.body[at].guard = guard.map(|guard| if random.below(2) == 0 { !guard } else { guard });
            }
            4 => {
                // A register or a number becomes another one of its class.
                let from: Vec<Arg> =
                    kernel.body[other].src.iter().chain(&kernel.body[other].dst).copied().collect();
                let inst = &mut kernel.body[at];
                let args = if random.below(2) == 0 { &mut inst.src } else { &mut inst.dst };
                if !args.is_empty() && !from.is_empty() {
                    let arg = random.below(args.len());
                    args[arg] = *random.of(&from);
                }
            }
            5 => {
                for arg in &mut kernel.body[at].src {
                    match arg {
                        Arg::Imm(imm) => imm.bits = *random.of(&[0, 1, 2, 15, 16, 0x7fff_ffff, 0xffff_ffff]),
                        Arg::Mem { offset, .. } => {
                            *offset = *random.of(&[0, -4, 1, 16, 1 << 20, i32::MIN, i32::MAX]);
                        }
                        _ => {}
                    }
                }
            }
            _ => kernel.body.truncate(at.max(1)),
        }
    }
    flow::set_reconvergence(kernel);
    module
}

#[test]
fn damaged_modules_that_the_checker_takes_are_simulated_without_a_panic() {
    let mut random = Random(3);
    let mut simulated = 0;
    let modules = emitted();
    for round in 0..rounds(80) {
        let module = damaged_module(&mut random, &modules[round % modules.len()]);
        let seed = random.0;
        let what = || format!("{module}\nwith the random numbers from {seed}");
        if without_panic(what, || check::module(&module).is_empty()) {
            simulated += 1;
            without_panic(what, || simulate(&mut Random(seed), &module));
        }
    }
    assert!(simulated * 10 > rounds(80), "the checker refuses all but {simulated}");
}
