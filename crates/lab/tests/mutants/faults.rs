//! The faults that are planted: what can be done to an instruction of a kernel, where, and how.

use std::collections::BTreeMap;

use flashcore_ptx::{
    Alu, Arg, ClusterArrive, Cmp, Imm, Inst, Kernel, NumType, Op, RegClass, RegId, RegInfo, flow,
};

/// A change to one instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// The instruction is dropped; of a wait in a loop, the loop.
    Drop,
    /// A wait leaves one more group in flight.
    WaitLess,
    /// An XOR becomes a copy of its first operand: a term of the swizzle, or the turn of a parity, is lost.
    NoSwizzle,
    /// A comparison takes its edge in, or leaves it out.
    OffByOne,
    /// A wait asks for the other parity.
    OtherParity,
    /// A barrier expects half of the bytes.
    HalfTheBytes,
    /// A barrier expects one more arrival.
    OneArrivalMore,
    /// An arrival publishes nothing.
    Relaxed,
    /// A descriptor says that rows are swizzled in 64 bytes.
    OtherSwizzle,
    /// A descriptor has half the distance from eight rows to the next eight.
    OtherStride,
    /// A descriptor has twice the distance from one panel to the next.
    OtherLeading,
    /// A descriptor stays at the start of its tile.
    NoStep,
}

/// The changes that can be made to an instruction.
fn changes(kernel: &Kernel, at: usize) -> Vec<Change> {
    let inst = &kernel.body[at];
    let constant = inst.src.iter().any(|arg| matches!(arg, Arg::Imm(_)));
    match inst.op {
        Op::BarSync { .. }
        | Op::BarArrive { .. }
        | Op::BarWarpSync
        | Op::CpAsyncCommit
        | Op::FenceProxyAsync(_)
        | Op::FenceMbarrierInit
        | Op::MbarrierArrive { .. }
        | Op::WgmmaFence
        | Op::WgmmaCommit
        | Op::BulkCommit
        | Op::SetMaxNReg { .. }
        | Op::ClusterWait { .. }
        | Op::GridDepControl(_) => vec![Change::Drop],
        Op::CpAsyncWait(_) | Op::WgmmaWait(_) | Op::BulkWait { .. } => vec![Change::Drop, Change::WaitLess],
        Op::MbarrierInit => vec![Change::Drop, Change::OneArrivalMore],
        Op::MbarrierArriveExpectTx { .. } => vec![Change::Drop, Change::HalfTheBytes],
        Op::MbarrierTryWait { .. } => vec![Change::Drop, Change::OtherParity],
        Op::ClusterArrive { sem: ClusterArrive::Release, .. } => vec![Change::Drop, Change::Relaxed],
        Op::ClusterArrive { .. } => vec![Change::Drop],
        Op::Alu(Alu::XorB32) => vec![Change::NoSwizzle],
        Op::Setp { ty: NumType::S32 | NumType::U32, cmp } if edge(cmp) != cmp => vec![Change::OffByOne],
        // The constants of a matrix descriptor: its upper half, and in the lower one the place and the panels.
        Op::PackB64 if constant => vec![Change::OtherSwizzle, Change::OtherStride],
        Op::Alu(Alu::OrB32) if constant && descriptor(inst) => vec![Change::OtherLeading],
        Op::Alu(Alu::AddU32) if constant && kernel.body[at + 1].op == Op::PackB64 => vec![Change::NoStep],
        _ => vec![],
    }
}

/// Whether an instruction stands where the emitter makes descriptors.
fn descriptor(inst: &Inst) -> bool {
    inst.loc.is_some_and(|loc| loc.file().ends_with("sm90/descriptor.rs"))
}

fn edge(cmp: Cmp) -> Cmp {
    match cmp {
        Cmp::Lt => Cmp::Le,
        Cmp::Le => Cmp::Lt,
        Cmp::Gt => Cmp::Ge,
        Cmp::Ge => Cmp::Gt,
        other => other,
    }
}

/// A fault, named by where the emitter makes it, so that it means the same in the kernels of all trials.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// The section and the comment, in the author's words, and the instruction.
    pub place: String,
    /// The emitter's file.
    pub file: String,
    /// And line.
    pub line: u32,
    /// What is done.
    pub change: Change,
    /// To which of the instructions that this line makes there. A comparison is changed in all of them at once,
    /// since a mask is wrong in all its elements or in none.
    pub nth: usize,
}

/// The instructions of each trial's kernel that a fault changes.
pub type Mutants = BTreeMap<Fault, Vec<(usize, Vec<usize>)>>;

/// Adds the faults that can be planted in a trial's kernel.
pub fn plant(kernel: &Kernel, trial: usize, mutants: &mut Mutants) {
    let mut here: Mutants = BTreeMap::new();
    for (at, inst) in kernel.body.iter().enumerate() {
        for change in changes(kernel, at) {
            let place = place(kernel, at);
            let loc = inst.loc.expect("the emitter's line");
            let mut fault = Fault { place, file: loc.file().to_string(), line: loc.line(), change, nth: 0 };
            if change == Change::OffByOne {
                here.entry(fault).or_insert_with(|| vec![(trial, Vec::new())])[0].1.push(at);
            } else {
                while here.contains_key(&fault) {
                    fault.nth += 1;
                }
                here.insert(fault, vec![(trial, vec![at])]);
            }
        }
    }
    for (fault, mut places) in here {
        mutants.entry(fault).or_default().append(&mut places);
    }
}

/// Where an instruction stands, in the author's words, and its name.
fn place(kernel: &Kernel, at: usize) -> String {
    let described = kernel.describe(at);
    let line = kernel.line(&kernel.body[at]);
    let name = line.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or("-");
    format!("{} / {} / {name}", described.section.unwrap_or("-"), described.comment.unwrap_or("-"))
}

/// Changes the instructions at these places.
pub fn apply(kernel: &mut Kernel, places: &[usize], change: Change) {
    // From the end, so that earlier positions stay valid.
    for &at in places.iter().rev() {
        apply_at(kernel, at, change);
    }
    flow::set_reconvergence(kernel);
}

fn apply_at(kernel: &mut Kernel, at: usize, change: Change) {
    let inst = &mut kernel.body[at];
    match (change, inst.op) {
        (Change::Drop, Op::MbarrierTryWait { .. }) => {
            assert!(matches!(kernel.body[at + 1].op, Op::Bra { .. }), "a wait is a loop");
            kernel.body.drain(at..at + 2);
        }
        (Change::Drop, _) => {
            kernel.body.remove(at);
        }
        (Change::WaitLess, Op::CpAsyncWait(pending)) => inst.op = Op::CpAsyncWait(pending + 1),
        (Change::WaitLess, Op::WgmmaWait(pending)) => inst.op = Op::WgmmaWait(pending + 1),
        (Change::WaitLess, Op::BulkWait { pending, read }) => {
            inst.op = Op::BulkWait { pending: pending + 1, read };
        }
        (Change::NoSwizzle | Change::NoStep, _) => {
            inst.op = Op::Alu(Alu::MovB32);
            // The register operand, where one is a constant.
            inst.src.retain(|arg| matches!(arg, Arg::Reg(_)));
            inst.src.truncate(1);
        }
        (Change::OffByOne, Op::Setp { cmp, ty }) => inst.op = Op::Setp { cmp: edge(cmp), ty },
        (Change::OtherParity, _) => match inst.src[1] {
            Arg::Reg(parity) => turn_parity(kernel, at, parity),
            _ => alter(inst, |parity| parity ^ 1),
        },
        (Change::HalfTheBytes, _) => alter(inst, |bytes| bytes / 2),
        (Change::OneArrivalMore, _) => alter(inst, |arrivals| arrivals + 1),
        (Change::Relaxed, Op::ClusterArrive { aligned, .. }) => {
            inst.op = Op::ClusterArrive { sem: ClusterArrive::Relaxed, aligned };
        }
        (Change::OtherSwizzle, _) => alter(inst, |high| (high & !(3 << 30)) | (2 << 30)),
        (Change::OtherStride, _) => alter(inst, |high| (high & !0x3FFF) | ((high & 0x3FFF) / 2)),
        (Change::OtherLeading, _) => alter(inst, |low| low * 2),
        (change, op) => unreachable!("{change:?} does not apply to {op:?}"),
    }
}

/// Alters the constant operand.
fn alter(inst: &mut Inst, new: impl Fn(u64) -> u64) {
    for arg in &mut inst.src {
        if let Arg::Imm(imm) = arg {
            imm.bits = new(imm.bits);
            return;
        }
    }
    unreachable!("{inst:?} has no constant");
}

/// Lets a wait ask for the other parity than a register says.
fn turn_parity(kernel: &mut Kernel, at: usize, parity: RegId) {
    let turned = RegId(kernel.regs.len() as u32);
    let number = kernel.regs.iter().filter(|reg| reg.class == RegClass::B32).count() as u32 + 1;
    kernel.regs.push(RegInfo { class: RegClass::B32, number });
    let one = Arg::Imm(Imm { class: RegClass::B32, bits: 1 });
    let turn = Inst {
        op: Op::Alu(Alu::XorB32),
        guard: None,
        dst: vec![Arg::Reg(turned)],
        src: vec![Arg::Reg(parity), one],
        ..kernel.body[at].clone()
    };
    kernel.body[at].src[1] = Arg::Reg(turned);
    kernel.body.insert(at, turn);
}
