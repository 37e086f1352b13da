//! The machine code that ptxas made, as nvdisasm shows it: does anything touch what a `wgmma` in flight still uses?
//!
//! [`check`](crate::check) sees that PTX keeps the rules of `wgmma`. That is not enough: ptxas takes a copy for the same
//! register where it may, and does not count a register as used once a `wgmma` that reads it as A is on its way. So the code
//! that runs is looked at, too. A group of products is in flight from its last one, which names the scoreboard `gsb0`, to a
//! `WARPGROUP.DEPBAR` that leaves no more groups than came after it, on every path and over the ends of loops.
//!
//! nvdisasm is in the PyPI package `nvidia-cuda-nvdisasm`, and looked for as [`Ptxas`](crate::ptxas::Ptxas) is.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::process::Command;
use std::{fmt, fs, io};

use crate::ptxas::tool;

/// Where the PyPI package puts it, below `site-packages`.
const PACKAGE_PLACES: [&str; 2] = ["nvidia/cu13/bin/nvdisasm", "nvidia/cuda_nvdisasm/bin/nvdisasm"];

/// The most groups that can be told apart.
const GROUPS: usize = 8;

/// Registers of a `wgmma`'s A operand.
const A_REGISTERS: u8 = 4;

/// An nvdisasm that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvdisasm {
    path: PathBuf,
}

impl Nvdisasm {
    /// The nvdisasm of this machine, if there is one.
    pub fn find() -> Option<Self> {
        tool("nvdisasm", &PACKAGE_PLACES).map(|path| Self { path })
    }

    /// The code of a binary as text.
    pub fn disassemble(&self, cubin: &[u8]) -> io::Result<String> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("module.cubin");
        fs::write(&file, cubin)?;
        let output = Command::new(&self.path).arg("-c").arg(&file).output()?;
        if !output.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// An instruction that touches a register of a `wgmma` in flight.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Touch {
    /// Where the instruction is.
    pub at: u32,
    /// The instruction.
    pub text: String,
    /// The register.
    pub register: u8,
    /// Whether it writes an A operand, rather than touching an accumulator.
    pub is_input: bool,
    /// Where the `wgmma` is.
    pub wgmma: u32,
}

impl fmt::Display for Touch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Touch { at, text, register, wgmma, .. } = self;
        let what = if self.is_input { "A operand" } else { "accumulator" };
        write!(f, "{at:#06x} `{text}` touches R{register}, an {what} of the wgmma in flight at {wgmma:#06x}")
    }
}

/// What was seen in the code of a module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Walked {
    /// `wgmma`s, and how many of them have A in registers.
    pub wgmmas: usize,
    /// Those with A in registers.
    pub with_registers: usize,
    /// What touches their registers too early.
    pub touches: Vec<Touch>,
}

/// Code that the walk does not understand.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at:#06x} `{text}`: {what}")]
pub struct Unclear {
    /// Where it is.
    pub at: u32,
    /// The instruction.
    pub text: String,
    /// What is unclear about it.
    pub what: &'static str,
}

/// Walks over the code of all kernels of a module, as nvdisasm prints it.
pub fn walk(sass: &str) -> Result<Walked, Unclear> {
    let mut walked = Walked::default();
    for code in Code::all(sass) {
        let products = code.lines.iter().filter_map(Line::wgmma).collect::<Vec<_>>();
        walked.wgmmas += products.len();
        walked.with_registers += products.iter().filter(|it| !it.a.is_empty()).count();
        code.walk(&mut walked.touches)?;
    }
    walked.touches.sort();
    walked.touches.dedup();
    Ok(walked)
}

/// An instruction.
#[derive(Debug)]
struct Line<'s> {
    at: u32,
    text: &'s str,
    guarded: bool,
    /// The name and what stands behind it after dots.
    mnemonic: Vec<&'s str>,
    operands: Vec<&'s str>,
}

/// What a `wgmma` uses.
struct Product {
    d: std::ops::Range<u16>,
    a: std::ops::Range<u16>,
    /// Whether it ends a group.
    commits: bool,
}

/// The number of a register at the beginning of an operand.
fn register(operand: &str) -> Option<u16> {
    let digits = operand.trim_start_matches(['-', '|', '~', '!']).strip_prefix('R')?;
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok()
}

/// Whether an operand is a predicate, as those before a result are.
fn is_predicate(operand: &str) -> bool {
    let name = operand.trim_start_matches('!').trim_start_matches('U');
    name == "PT"
        || name.strip_prefix('P').is_some_and(|n| !n.is_empty() && n.bytes().all(|c| c.is_ascii_digit()))
}

impl<'s> Line<'s> {
    fn read(line: &'s str) -> Option<Self> {
        let (at, text) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
        let at = u32::from_str_radix(at, 16).ok()?;
        let text = text.trim_matches([' ', '{', '}', '\t']).trim_end_matches([';', ' ']);
        let guarded = text.starts_with('@');
        let rest = if guarded { text.split_once(char::is_whitespace)?.1.trim_start() } else { text };
        let (name, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let operands = operands.split(',').map(str::trim).filter(|operand| !operand.is_empty()).collect();
        Some(Self { at, text, guarded, mnemonic: name.split('.').collect(), operands })
    }

    fn unclear(&self, what: &'static str) -> Unclear {
        Unclear { at: self.at, text: self.text.into(), what }
    }

    fn name(&self) -> &'s str {
        self.mnemonic[0]
    }

    fn has(&self, part: &str) -> bool {
        self.mnemonic[1..].contains(&part)
    }

    fn wgmma(&self) -> Option<Product> {
        if !self.name().ends_with("GMMA") {
            return None;
        }
        let columns = self.mnemonic.iter().find_map(|part| part.split('x').nth(1)?.parse::<u16>().ok())?;
        let of = register(self.operands.first()?)?;
        // The type of the sums comes first.
        let sums = self.mnemonic.iter().find(|part| ["F32", "S32", "F16"].contains(part))?;
        let count = if *sums == "F16" { columns / 4 } else { columns / 2 };
        let a = register(self.operands.get(1)?).map_or(0..0, |a| a..a + u16::from(A_REGISTERS));
        Some(Product { d: of..of + count, a, commits: self.operands.iter().any(|it| it.starts_with("gsb")) })
    }

    /// The groups that a wait leaves in flight.
    fn wait(&self) -> Option<usize> {
        let waits = self.name() == "WARPGROUP" && self.has("DEPBAR") && !self.guarded;
        let count = self.operands.get(1).filter(|_| waits)?;
        usize::from_str_radix(count.trim_start_matches("0x"), 16).ok()
    }

    /// The registers that it writes, besides those of a `wgmma`.
    fn writes(&self) -> std::ops::Range<u16> {
        let name = self.name();
        let without = ["BAR", "NANOSLEEP", "WARPSYNC", "BMOV", "RET", "CALL", "BRX", "JMX"];
        if name.contains("SETP") || name == "FCHK" || without.contains(&name) {
            return 0..0;
        }
        let Some(first) =
            self.operands.iter().find(|operand| !is_predicate(operand)).and_then(|it| register(it))
        else {
            return 0..0;
        };
        let last = self.mnemonic.last().copied();
        let count = match name {
            "HMMA" => 2 * (1 + u16::from(self.has("F32"))),
            "IMMA" | "QMMA" | "DMMA" => 4,
            "LDSM" => last.and_then(|matrices| matrices.parse().ok()).filter(|&n| n <= 4).unwrap_or(1),
            "CS2R" if !self.has("32") => 2,
            "DADD" | "DMUL" | "DFMA" | "LEPC" => 2,
            _ if self.has("128") => 4,
            _ if ["64", "WIDE", "F64", "S64", "U64"].iter().any(|part| self.has(part)) => 2,
            _ => 1,
        };
        first..first + count
    }

    /// The registers that it names.
    fn names(&self) -> impl Iterator<Item = u16> {
        let apart = |c: char| !c.is_ascii_alphanumeric();
        self.operands.iter().flat_map(move |operand| operand.split(apart)).filter_map(register)
    }

    /// The labels that it names.
    fn labels(&self) -> impl Iterator<Item = &'s str> {
        self.operands.iter().filter_map(|operand| operand.split_once("`(")?.1.strip_suffix(')'))
    }
}

/// The code of a kernel.
#[derive(Default)]
struct Code<'s> {
    lines: Vec<Line<'s>>,
    /// The instruction that comes after a label.
    labels: BTreeMap<&'s str, usize>,
}

/// The `wgmma` that uses each register.
type Uses = BTreeMap<u16, u32>;

/// What a group of products uses.
#[derive(Clone, Debug, Default, PartialEq)]
struct Group {
    a: Uses,
    d: Uses,
}

impl Group {
    fn extend(&mut self, other: &Group) {
        for (mine, others) in [(&mut self.a, &other.a), (&mut self.d, &other.d)] {
            // What is known of a register stays, so that a walk over a loop comes to an end.
            for (&register, &wgmma) in others {
                mine.entry(register).or_insert(wgmma);
            }
        }
    }
}

/// What is in flight at a point of the code.
#[derive(Clone, Debug, Default, PartialEq)]
struct State {
    /// Products since the last end of a group.
    open: Group,
    /// Groups, the newest first.
    pending: VecDeque<Group>,
}

impl State {
    fn groups(&self) -> impl Iterator<Item = &Group> {
        std::iter::once(&self.open).chain(&self.pending)
    }

    fn meet(&mut self, other: &State) {
        self.open.extend(&other.open);
        for (i, group) in other.pending.iter().enumerate() {
            match self.pending.get_mut(i) {
                Some(mine) => mine.extend(group),
                None => self.pending.push_back(group.clone()),
            }
        }
    }

    fn step(&mut self, line: &Line<'_>, touches: &mut Vec<Touch>) {
        let mut touch = |register: u16, is_input: bool, wgmma: u32| {
            let register = register as u8;
            touches.push(Touch { at: line.at, text: line.text.into(), register, is_input, wgmma });
        };
        if let Some(product) = line.wgmma() {
            for group in self.groups() {
                product
                    .d
                    .clone()
                    .for_each(|r| group.a.get(&r).into_iter().for_each(|&at| touch(r, true, at)));
                product
                    .a
                    .clone()
                    .for_each(|r| group.d.get(&r).into_iter().for_each(|&at| touch(r, false, at)));
            }
            self.open.a.extend(product.a.map(|r| (r, line.at)));
            self.open.d.extend(product.d.map(|r| (r, line.at)));
            if product.commits {
                self.pending.push_front(std::mem::take(&mut self.open));
                if self.pending.len() > GROUPS {
                    let oldest = self.pending.pop_back().unwrap_or_default();
                    self.pending[GROUPS - 1].extend(&oldest);
                }
            }
        } else if let Some(keep) = line.wait() {
            self.pending.truncate(keep);
        } else {
            for group in self.groups() {
                line.writes().for_each(|r| group.a.get(&r).into_iter().for_each(|&at| touch(r, true, at)));
                let all = line.names().chain(line.writes());
                all.for_each(|r| group.d.get(&r).into_iter().for_each(|&at| touch(r, false, at)));
            }
        }
    }
}

impl<'s> Code<'s> {
    /// That of each kernel.
    fn all(sass: &'s str) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for line in sass.lines() {
            if line.starts_with(".text.") {
                all.push(Self::default());
            }
            let Some(code) = all.last_mut() else { continue };
            if let Some(label) = line.trim().strip_suffix(':') {
                code.labels.insert(label, code.lines.len());
            } else if let Some(line) = Line::read(line) {
                code.lines.push(line);
            }
        }
        all
    }

    /// The instructions that may come after one.
    fn after(&self, index: usize) -> Result<Vec<usize>, Unclear> {
        let line = &self.lines[index];
        let place = |label: &str| self.labels.get(label).copied().ok_or(line.unclear("no such label"));
        let behind = (index + 1 < self.lines.len()).then_some(index + 1);
        let targets = || line.labels().map(place).collect::<Result<Vec<_>, _>>();
        match line.name() {
            "EXIT" if !line.guarded => Ok(Vec::new()),
            "BRA" => {
                let always = !line.guarded && line.operands.len() == 1 && line.mnemonic.len() == 1;
                Ok(targets()?.into_iter().chain(behind.filter(|_| !always)).collect())
            }
            // Where threads come together again, as their barrier was told: mostly right here.
            "BSYNC" => {
                let told =
                    |it: &&Line<'_>| it.name() == "BSSY" && it.operands.first() == line.operands.first();
                let labels = self.lines.iter().filter(told).flat_map(Line::labels);
                let all = labels.map(place).collect::<Result<Vec<_>, _>>()?;
                let here = behind.filter(|behind| all.contains(behind));
                Ok(here.map_or(all, |here| vec![here]))
            }
            // An instruction of all lanes that some reach apart: they execute what follows up to the label together.
            "WARPSYNC" => Ok(targets()?.into_iter().chain(behind).collect()),
            // Their labels are where others go; who leaves a barrier goes on behind it.
            "BSSY" | "BREAK" => Ok(behind.into_iter().collect()),
            "BRX" | "JMX" | "JMP" | "RET" | "CALL" => Err(line.unclear("where it goes is not known")),
            _ if line.labels().next().is_some() => {
                Err(line.unclear("what it does with a label is not known"))
            }
            _ => Ok(behind.into_iter().collect()),
        }
    }

    fn walk(&self, touches: &mut Vec<Touch>) -> Result<(), Unclear> {
        let mut products = self.lines.iter().filter(|it| it.name().ends_with("GMMA")).peekable();
        if products.peek().is_none() {
            // Nothing is ever in flight, wherever the code goes.
            return Ok(());
        }
        if let Some(line) = products.find(|it| it.wgmma().is_none()) {
            return Err(line.unclear("its registers are not known"));
        }
        // Where paths meet, what may be in flight there.
        let mut arriving: BTreeMap<usize, State> = BTreeMap::from([(0, State::default())]);
        let mut todo = VecDeque::from([0]);
        let meets: Vec<usize> = self.labels.values().copied().collect();
        while let Some(start) = todo.pop_front() {
            let Some(mut state) = arriving.get(&start).cloned() else { continue };
            let mut at = start;
            while at < self.lines.len() {
                state.step(&self.lines[at], touches);
                let next = self.after(at)?;
                if let [only] = next[..]
                    && !meets.contains(&only)
                {
                    at = only;
                    continue;
                }
                for next in next {
                    let known = arriving.get(&next);
                    let mut met = known.cloned().unwrap_or_default();
                    met.meet(&state);
                    if known != Some(&met) {
                        arriving.insert(next, met);
                        todo.push_back(next);
                    }
                }
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kernel of these instructions and labels, one per line.
    fn kernel(lines: &str) -> String {
        let mut text = ".text.kernel:\n".to_owned();
        for (i, line) in lines.lines().map(str::trim).filter(|line| !line.is_empty()).enumerate() {
            let written = if line.ends_with(':') {
                format!("{line}\n")
            } else {
                format!("        /*{:04x}*/   {line} ;\n", 16 * i)
            };
            text.push_str(&written);
        }
        text
    }

    fn touched(lines: &str) -> Vec<(u8, bool)> {
        let walked = walk(&kernel(lines)).unwrap();
        walked.touches.into_iter().map(|touch| (touch.register, touch.is_input)).collect()
    }

    const PRODUCT: &str = "HGMMA.64x64x16.F32.BF16 R24, R184, gdesc[UR4].tnspB, R24, gsb0";

    #[test]
    fn a_operands_may_be_written_after_the_wait_and_not_before() {
        let pack = "F2FP.BF16.F32.PACK_AB R186, R9, R8";
        let wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0";
        assert_eq!(touched(&format!("{PRODUCT}\n{wait}\n{pack}\nEXIT")), []);
        assert_eq!(touched(&format!("{PRODUCT}\n{pack}\n{wait}\nEXIT")), [(186, true)]);
        // A wait that leaves the group in flight, or that may not be executed.
        assert_eq!(
            touched(&format!("{PRODUCT}\nWARPGROUP.DEPBAR.LE gsb0, 0x1\n{pack}\nEXIT")),
            [(186, true)]
        );
        assert_eq!(touched(&format!("{PRODUCT}\n@P0 {wait}\n{pack}\nEXIT")), [(186, true)]);
        // Reading them does no harm.
        assert_eq!(touched(&format!("{PRODUCT}\nMOV R2, R186\nSTS [R3], R187\n{wait}\nEXIT")), []);
    }

    #[test]
    fn wide_writes_reach_every_register_that_they_write() {
        for (line, found) in [
            ("LDS.128 R181, [R2]", vec![184]),
            ("LDS.64 R183, [R2]", vec![184]),
            ("LDS R183, [R2]", vec![]),
            ("LDSM.16.M88.4 R182, [R2]", vec![184, 185]),
            ("IMAD.WIDE.U32 R183, R2, R3, R4", vec![184]),
            ("CS2R R182, SRZ", vec![]),
            ("CS2R R183, SRZ", vec![184]),
            ("SHFL.BFLY PT, R185, R4, 0x1, 0x1f", vec![185]),
            ("ISETP.GT.AND P0, PT, R185, R4, PT", vec![]),
            ("LOP3.LUT P0, RZ, R185, 0x1, RZ, 0xc0, !PT", vec![]),
            ("STS.128 [R4], R184", vec![]),
            ("BAR.SYNC.DEFER_BLOCKING R185, 0x80", vec![]),
            ("HMMA.16816.F32.BF16 R182, R4, R8, R182", vec![184, 185]),
        ] {
            let all: Vec<_> = touched(&format!("{PRODUCT}\n{line}\nEXIT")).into_iter().collect();
            assert_eq!(all, found.into_iter().map(|r| (r, true)).collect::<Vec<_>>(), "{line}");
        }
    }

    #[test]
    fn accumulators_may_not_even_be_read() {
        assert_eq!(touched(&format!("{PRODUCT}\nFADD R2, R3, R55\nEXIT")), [(55, false)]);
        assert_eq!(touched(&format!("{PRODUCT}\nFADD R2, R3, R56\nEXIT")), []);
        assert_eq!(touched(&format!("{PRODUCT}\n{PRODUCT}\nEXIT")), [], "one product after the other");
        let half = PRODUCT.replace("F32.BF16", "F16");
        assert_eq!(touched(&format!("{half}\nFADD R2, R3, R40\nEXIT")), []);
        let over = PRODUCT.replace("R184", "R192").replace("R24", "R160");
        assert_eq!(touched(&format!("{PRODUCT}\n{over}\nEXIT")).len(), 4, "sums over another's operands");
    }

    #[test]
    fn a_product_in_flight_over_the_end_of_a_loop_is_followed() {
        let turn = |wait: u32| {
            format!(
                ".L_x_0:\nF2FP.BF16.F32.PACK_AB R184, R9, R8\nWARPGROUP.ARRIVE\n{PRODUCT}\n\
                 HGMMA.64x64x16.F32.BF16 R120, gdesc[UR8], RZ, !UPT, gsb0\n\
                 WARPGROUP.DEPBAR.LE gsb0, {wait:#x}\n@P0 BRA `(.L_x_0)\nEXIT"
            )
        };
        // With one group left, it is the newest.
        assert_eq!(touched(&turn(1)), []);
        assert_eq!(touched(&turn(2)), [(184, true)]);
    }

    #[test]
    fn threads_come_together_where_their_barrier_was_told_to() {
        let twice = |end: &str| {
            format!(
                "BSSY B0, `(.L_x_0)\n{PRODUCT}\nBSYNC B0\n{end}WARPGROUP.DEPBAR.LE gsb0, 0x0\nBSSY B0, `(.L_x_1)\n\
                 BSYNC B0\n.L_x_1:\nMOV R184, R2\nEXIT"
            )
        };
        assert_eq!(touched(&twice(".L_x_0:\n")), []);
        // Where it is elsewhere, it may be any that the barrier was ever told.
        assert_eq!(touched(&twice("EXIT\n.L_x_0:\n")), [(184, true)]);
        // Leaving a barrier leads nowhere by itself.
        let leave = format!(
            "{PRODUCT}\n@P1 BREAK B0\n@P1 BRA `(.L_x_0)\nWARPGROUP.DEPBAR.LE gsb0, 0x0\n.L_x_0:\nMOV R184, R2\nEXIT"
        );
        assert_eq!(touched(&leave), [(184, true)]);
    }

    #[test]
    fn what_is_not_understood_is_said() {
        for line in ["BRX R4 -0x10", "BRA `(.L_x_9)", "CALL.REL.NOINC `(.L_x_0)", "HGMMA.64x64 R24"] {
            assert!(walk(&kernel(&format!(".L_x_0:\n{PRODUCT}\n{line}\nEXIT"))).is_err(), "{line}");
        }
        let without = walk(&kernel(".L_x_0:\nCALL.REL.NOINC `(.L_x_0)\nEXIT"));
        assert_eq!(without, Ok(Walked::default()), "without products there is nothing to find");
        let walked =
            walk(&kernel(&format!("{PRODUCT}\nHGMMA.64x64x16.F32.BF16 R120, gdesc[UR8], RZ, !UPT\nEXIT")));
        assert_eq!(walked.map(|walked| (walked.wgmmas, walked.with_registers)), Ok((2, 1)));
    }
}
