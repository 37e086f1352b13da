//! A module as PTX text: readable, and the same for the same module.

use std::fmt;

use crate::inst::*;
use crate::modifiers::*;
use crate::module::{Kernel, Module, Threads};
use crate::params::ParamType;
use crate::types::*;

/// The name of a kernel's shared memory in the text.
const SMEM: &str = "smem";

impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, ".version {}", self.isa())?;
        writeln!(f, ".target {}", self.target)?;
        writeln!(f, ".address_size 64")?;
        let align = self.kernels.iter().filter(|k| k.shared_bytes() > 0).map(|k| k.shared.align()).max();
        if let Some(align) = align {
            writeln!(f, "\n.extern .shared .align {align} .b8 {SMEM}[];")?;
        }
        for kernel in &self.kernels {
            writeln!(f)?;
            write!(f, "{kernel}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, ".visible .entry {}(", self.name)?;
        for (i, param) in self.params.iter().enumerate() {
            let separator = if i == 0 { "" } else { "," };
            write!(f, "{separator}\n    .param {} {}", param_type(param.ty), self.param_name(i as u32))?;
            if param.ty == ParamType::TensorMap {
                write!(f, "[{}]", param.ty.bytes())?;
            }
        }
        writeln!(f, "{})", if self.params.is_empty() { "" } else { "\n" })?;
        match self.threads {
            Some(Threads::Exactly([x, y, z])) => writeln!(f, ".reqntid {x}, {y}, {z}")?,
            Some(Threads::AtMost([x, y, z])) => writeln!(f, ".maxntid {x}, {y}, {z}")?,
            None => {}
        }
        if let Some(blocks) = self.min_blocks_per_sm {
            writeln!(f, ".minnctapersm {blocks}")?;
        }
        if let Some(count) = self.max_regs {
            writeln!(f, ".maxnreg {count}")?;
        }
        if let Some([x, y, z]) = self.cluster {
            writeln!(f, ".reqnctapercluster {x}, {y}, {z}")?;
        }
        writeln!(f, "{{")?;
        for class in RegClass::ALL {
            let count = self.regs.iter().filter(|r| r.class == class).map(|r| r.number + 1).max();
            if let Some(count) = count {
                writeln!(f, "    .reg .{} {}<{count}>;", class.type_name(), class.prefix())?;
            }
        }
        if !self.shared.allocs().is_empty() {
            writeln!(f, "\n    // shared memory: {} bytes", self.shared_bytes())?;
            for alloc in self.shared.allocs() {
                let end = alloc.offset.saturating_add(alloc.bytes);
                let note = if alloc.over.is_empty() { "" } else { " (reused)" };
                writeln!(f, "    //   {:>6}..{end:<6} {}{note}", alloc.offset, ascii(&alloc.name))?;
            }
        }
        let mut section = None;
        for inst in &self.body {
            if inst.section != section {
                section = inst.section;
                if let Some(name) = section.and_then(|s| self.sections.get(s as usize)) {
                    writeln!(f, "\n    // ---- {}", ascii(name))?;
                }
            }
            for line in inst.comment.iter().flat_map(|c| c.lines()) {
                writeln!(f, "    // {}", ascii(line))?;
            }
            writeln!(f, "{}", Line { kernel: self, inst })?;
        }
        writeln!(f, "}}")
    }
}

/// Text as one line of ASCII: ptxas refuses anything else, even in a comment.
fn ascii(words: &str) -> String {
    let mut text = String::with_capacity(words.len());
    for c in words.chars() {
        match c {
            ' '..='~' => text.push(c),
            'ᵀ' => text.push_str("^T"),
            '×' => text.push('x'),
            '·' => text.push('*'),
            '−' | '–' | '—' => text.push('-'),
            '→' => text.push_str("->"),
            '←' => text.push_str("<-"),
            '≤' => text.push_str("<="),
            '≥' => text.push_str(">="),
            '≠' => text.push_str("!="),
            '…' => text.push_str("..."),
            _ if c.is_whitespace() => text.push(' '),
            _ => text.push('?'),
        }
    }
    text
}

fn param_type(ty: ParamType) -> &'static str {
    match ty {
        ParamType::U32 => ".u32",
        ParamType::S32 => ".s32",
        ParamType::U64 => ".u64",
        ParamType::S64 => ".s64",
        ParamType::F32 => ".f32",
        ParamType::GlobalPtr => ".u64 .ptr .global",
        ParamType::TensorMap => ".align 64 .b8",
    }
}

impl Kernel {
    /// A parameter's name in the text: the kernel's and its own, since parameters share the module's names.
    fn param_name(&self, index: u32) -> String {
        let name = self.params.get(index as usize).map_or("unknown", |p| p.name.as_str());
        format!("{}_{name}", self.name)
    }

    /// One instruction as text, without indentation or end of line.
    pub fn line(&self, inst: &Inst) -> String {
        Line { kernel: self, inst }.to_string().trim_start().to_owned()
    }

    /// An operand as text.
    pub fn arg_name(&self, arg: Arg) -> String {
        match arg {
            Arg::Reg(id) => self.reg_name(id),
            Arg::Imm(imm) => constant(imm),
            Arg::Mem { .. } => format!("[{}]", self.symbol(arg)),
            Arg::Sink => "_".to_owned(),
        }
    }

    /// An address without its brackets.
    fn symbol(&self, arg: Arg) -> String {
        let Arg::Mem { base, offset } = arg else { return self.arg_name(arg) };
        let (base, offset) = match base {
            MemBase::Reg(id) => (self.reg_name(id), i64::from(offset)),
            MemBase::Shared(_) => (SMEM.to_owned(), self.shared_offset(arg).unwrap_or(0)),
            MemBase::Param(index) => (self.param_name(index), i64::from(offset)),
        };
        // PTX has no subtraction here: a negative offset is added.
        if offset == 0 { base } else { format!("{base}+{offset}") }
    }

    /// A label's name in the text.
    pub fn label_name(&self, label: LabelId) -> String {
        match self.labels.get(label.0 as usize) {
            Some(name) => format!("${}_{name}", self.name),
            None => format!("${}_unknown_{}", self.name, label.0),
        }
    }

    /// A register's name in the text.
    pub fn reg_name(&self, id: RegId) -> String {
        self.reg(id).map_or_else(|| format!("%unknown{}", id.0), ToString::to_string)
    }
}

/// One instruction of a kernel.
struct Line<'k> {
    kernel: &'k Kernel,
    inst: &'k Inst,
}

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Op::Label(label) = self.inst.op {
            return write!(f, "{}:", self.kernel.label_name(label));
        }
        f.write_str("    ")?;
        if let Some(guard) = self.inst.guard {
            let not = if guard.negated { "!" } else { "" };
            write!(f, "@{not}{} ", self.kernel.reg_name(guard.reg.id()))?;
        }
        let (mnemonic, operands) = (mnemonic(self.inst), self.operands());
        let gap = if operands.is_empty() { "" } else { " " };
        write!(f, "{mnemonic}{gap}{operands};")
    }
}

/// `text` where the condition holds.
fn when(condition: bool, text: &'static str) -> &'static str {
    if condition { text } else { "" }
}

fn order(order: Order) -> String {
    match order {
        Order::Weak => String::new(),
        Order::Volatile => ".volatile".to_owned(),
        Order::Relaxed(scope) => format!(".relaxed{}", scope.text()),
        Order::Acquire(scope) => format!(".acquire{}", scope.text()),
        Order::Release(scope) => format!(".release{}", scope.text()),
    }
}

fn cache(hint: CacheHint) -> String {
    format!(
        "{}{}{}{}{}",
        hint.op.map_or("", CacheOp::text),
        when(hint.non_coherent, ".nc"),
        hint.l1.map_or("", L1Evict::text),
        when(hint.policy, ".L2::cache_hint"),
        hint.l2_prefetch.map_or("", L2Prefetch::text),
    )
}

/// `.noftz`, which additions of halves must state.
fn noftz(op: AtomOp, ty: AtomTy) -> &'static str {
    let half = matches!(ty, AtomTy::F16 | AtomTy::Bf16 | AtomTy::F16x2 | AtomTy::Bf16x2);
    when(op == AtomOp::Add && half, ".noftz")
}

/// The mnemonic with all its modifiers.
fn mnemonic(inst: &Inst) -> String {
    const HINT: &str = ".L2::cache_hint";
    const TX: &str = ".mbarrier::complete_tx::bytes";
    match inst.op {
        Op::Alu(alu) => alu.line().text.to_owned(),
        Op::Setp { cmp, ty } => format!("setp{}{}", cmp.text(), ty.text()),
        Op::MovSpecial(s) => when(s.is_64_bit(), "mov.u64").to_owned() + when(!s.is_64_bit(), "mov.u32"),
        Op::PackB64 | Op::UnpackB64 => "mov.b64".to_owned(),
        Op::PackB32 | Op::UnpackB32 => "mov.b32".to_owned(),
        Op::AddrOf => match inst.src.first() {
            Some(Arg::Mem { base: MemBase::Param(_), .. }) => "mov.b64".to_owned(),
            _ => "mov.u32".to_owned(),
        },
        Op::Cvta { space, to_space } => format!("cvta{}{}.u64", when(to_space, ".to"), space.text()),
        Op::CreatePolicy(evict) => format!("createpolicy.fractional{}.b64", evict.text()),
        Op::Label(_) => String::new(),
        Op::Bra { .. } => "bra".to_owned(),
        Op::Exit => "exit".to_owned(),
        Op::Ret => "ret".to_owned(),
        Op::Trap => "trap".to_owned(),
        Op::Ld { space, ty, width, order: o, cache: c } => {
            format!("ld{}{}{}{}{}", order(o), space.text(), cache(c), width.text(), ty.text())
        }
        Op::St { space, ty, width, order: o, cache: c } => {
            format!("st{}{}{}{}{}", order(o), space.text(), cache(c), width.text(), ty.text())
        }
        Op::Prefetch(level) => format!("prefetch.global{}", level.text()),
        Op::Atom { space, op, ty, sem, scope } => format!(
            "atom{}{}{}{}{}{}",
            sem.text(),
            scope.text(),
            space.text(),
            op.text(),
            noftz(op, ty),
            ty.text()
        ),
        Op::Red { space, op, ty, width, sem, scope } => format!(
            "red{}{}{}{}{}{}{}",
            sem.text(),
            scope.text(),
            space.text(),
            op.text(),
            noftz(op, ty),
            width.text(),
            ty.text()
        ),
        Op::Shfl(mode) => format!("shfl.sync{}.b32", mode.text()),
        Op::Vote(mode) => format!("vote.sync{}.pred", mode.text()),
        Op::Ballot => "vote.sync.ballot.b32".to_owned(),
        Op::Match(mode) => format!("match{}.sync.b32", mode.text()),
        Op::Redux { op, ty } => format!("redux.sync{}{}", op.text(), ty.text()),
        Op::Elect => "elect.sync".to_owned(),
        Op::ActiveMask => "activemask.b32".to_owned(),
        Op::BarWarpSync => "bar.warp.sync".to_owned(),
        Op::BarSync { aligned } => format!("{}.sync", if aligned { "bar" } else { "barrier" }),
        Op::BarArrive { aligned } => format!("{}.arrive", if aligned { "bar" } else { "barrier" }),
        Op::Membar(level) => format!("membar{}", level.text()),
        Op::Fence { sem, scope } => format!("fence{}{}", sem.text(), scope.text()),
        Op::FenceProxyAsync(space) => format!("fence.proxy.async{}", space.text()),
        Op::FenceMbarrierInit => "fence.mbarrier_init.release.cluster".to_owned(),
        Op::CpAsync { cache, l2_prefetch, policy, .. } => format!(
            "cp.async{}.shared.global{}{}",
            cache.text(),
            when(policy, HINT),
            l2_prefetch.map_or("", L2Prefetch::text)
        ),
        Op::CpAsyncCommit => "cp.async.commit_group".to_owned(),
        Op::CpAsyncWait(_) => "cp.async.wait_group".to_owned(),
        Op::CpAsyncWaitAll => "cp.async.wait_all".to_owned(),
        Op::CpAsyncMbarrierArrive { noinc } => {
            format!("cp.async.mbarrier.arrive{}.shared.b64", when(noinc, ".noinc"))
        }
        Op::Ldmatrix { count, trans } => {
            format!("ldmatrix.sync.aligned.m8n8{}{}.shared.b16", count.text(), when(trans, ".trans"))
        }
        Op::Stmatrix { count, trans } => {
            format!("stmatrix.sync.aligned.m8n8{}{}.shared.b16", count.text(), when(trans, ".trans"))
        }
        Op::Mma { shape, a, b, acc } => format!(
            "mma.sync.aligned{}.row.col{}{}{}{}",
            shape.text(),
            acc.text(),
            a.text(),
            b.text(),
            acc.text()
        ),
        Op::MbarrierInit => "mbarrier.init.shared.b64".to_owned(),
        Op::MbarrierInval => "mbarrier.inval.shared.b64".to_owned(),
        Op::MbarrierArrive { space: Space::SharedCluster, scope, .. } => {
            format!(
                "mbarrier.arrive{}.shared::cluster.b64",
                when(scope == Scope::Cluster, ".release.cluster")
            )
        }
        Op::MbarrierArrive { .. } => "mbarrier.arrive.shared.b64".to_owned(),
        Op::MbarrierArriveExpectTx { space: Space::SharedCluster } => {
            "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64".to_owned()
        }
        Op::MbarrierArriveExpectTx { .. } => "mbarrier.arrive.expect_tx.shared::cta.b64".to_owned(),
        Op::MbarrierExpectTx { space: Space::SharedCluster } => {
            "mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64".to_owned()
        }
        Op::MbarrierExpectTx { .. } => "mbarrier.expect_tx.relaxed.cta.shared::cta.b64".to_owned(),
        Op::MbarrierTestWait { parity, scope } => {
            format!("mbarrier.test_wait{}{}.b64", when(parity, ".parity"), wait_scope(scope))
        }
        Op::MbarrierTryWait { parity, scope, .. } => {
            format!("mbarrier.try_wait{}{}.b64", when(parity, ".parity"), wait_scope(scope))
        }
        Op::BulkLoad { multicast, policy } => format!(
            "cp.async.bulk.shared::cluster.global{TX}{}{}",
            when(multicast, ".multicast::cluster"),
            when(policy, HINT)
        ),
        Op::BulkStore { policy } => {
            format!("cp.async.bulk.global.shared::cta.bulk_group{}", when(policy, HINT))
        }
        Op::BulkToCluster => format!("cp.async.bulk.shared::cluster.shared::cta{TX}"),
        Op::BulkPrefetch { policy } => format!("cp.async.bulk.prefetch.L2.global{}", when(policy, HINT)),
        Op::BulkReduce { op, ty, policy } => format!(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group{}{}{}{}",
            when(policy, HINT),
            op.text(),
            noftz(op, ty),
            ty.text()
        ),
        Op::BulkReduceCluster { op, ty } => {
            format!("cp.reduce.async.bulk.shared::cluster.shared::cta{TX}{}{}", op.text(), ty.text())
        }
        Op::TensorLoad { dims, multicast, policy } => format!(
            "cp.async.bulk.tensor{}.shared::cluster.global.tile{TX}{}{}",
            dims.text(),
            when(multicast, ".multicast::cluster"),
            when(policy, HINT)
        ),
        Op::TensorStore { dims, policy } => {
            format!(
                "cp.async.bulk.tensor{}.global.shared::cta.tile.bulk_group{}",
                dims.text(),
                when(policy, HINT)
            )
        }
        Op::TensorReduce { op, dims, policy } => format!(
            "cp.reduce.async.bulk.tensor{}.global.shared::cta{}.tile.bulk_group{}",
            dims.text(),
            op.text(),
            when(policy, HINT)
        ),
        Op::TensorPrefetch { dims, policy } => {
            format!("cp.async.bulk.prefetch.tensor{}.L2.global.tile{}", dims.text(), when(policy, HINT))
        }
        Op::BulkCommit => "cp.async.bulk.commit_group".to_owned(),
        Op::BulkWait { read, .. } => format!("cp.async.bulk.wait_group{}", when(read, ".read")),
        Op::PrefetchTensormap => "prefetch.tensormap".to_owned(),
        Op::Wgmma(w) => format!(
            "wgmma.mma_async.sync.aligned.m64n{}k{}{}{}{}",
            w.n,
            w.k(),
            w.acc.text(),
            w.a.text(),
            w.b.text()
        ),
        Op::WgmmaFence => "wgmma.fence.sync.aligned".to_owned(),
        Op::WgmmaCommit => "wgmma.commit_group.sync.aligned".to_owned(),
        Op::WgmmaWait(_) => "wgmma.wait_group.sync.aligned".to_owned(),
        Op::SetMaxNReg { inc, .. } => {
            format!("setmaxnreg.{}.sync.aligned.u32", if inc { "inc" } else { "dec" })
        }
        Op::Mapa => "mapa.shared::cluster.u32".to_owned(),
        Op::GetCtaRank => "getctarank.shared::cluster.u32".to_owned(),
        Op::ClusterArrive { sem, aligned } => {
            format!("barrier.cluster.arrive{}{}", sem.text(), when(aligned, ".aligned"))
        }
        Op::ClusterWait { aligned } => format!("barrier.cluster.wait.acquire{}", when(aligned, ".aligned")),
        Op::StAsync { ty, width } => format!("st.async.shared::cluster{TX}{}{}", width.text(), ty.text()),
        Op::GridDepControl(action) => format!("griddepcontrol{}", action.text()),
        Op::Nanosleep => "nanosleep.u32".to_owned(),
    }
}

/// The acquire of an mbarrier wait; the block's is the default.
fn wait_scope(scope: Scope) -> &'static str {
    if scope == Scope::Cluster { ".acquire.cluster.shared::cta" } else { ".shared" }
}

impl Line<'_> {
    /// The operands, in the order and with the brackets that PTX has them.
    fn operands(&self) -> String {
        let (dst, src) = (&self.inst.dst, &self.inst.src);
        match self.inst.op {
            Op::MovSpecial(special) => format!("{}, {}", self.list(dst), special.text()),
            Op::PackB64 | Op::PackB32 => format!("{}, {}", self.list(dst), self.braces(src)),
            Op::UnpackB64 | Op::UnpackB32 => format!("{}, {}", self.braces(dst), self.list(src)),
            Op::AddrOf => {
                let address = src.first().map_or_else(String::new, |&a| self.kernel.symbol(a));
                format!("{}, {address}", self.list(dst))
            }
            Op::CreatePolicy(_) => format!("{}, 1.0", self.list(dst)),
            Op::Bra { target, .. } => self.kernel.label_name(target),
            Op::Ld { width, .. } => format!("{}, {}", self.vector(dst, width), self.list(src)),
            Op::St { width, .. } | Op::Red { width, .. } => {
                let (values, rest) = split(&src[1.min(src.len())..], width.count() as usize);
                let values = self.vector(values, width);
                join(&[self.list(&src[..1.min(src.len())]), values, self.list(rest)])
            }
            Op::StAsync { width, .. } => {
                let (addr, rest) = split(src, 1);
                let (values, bar) = split(rest, width.count() as usize);
                join(&[self.list(addr), self.vector(values, width), self.list(bar)])
            }
            Op::Shfl(_) | Op::Elect => {
                let bars: Vec<_> = match dst.as_slice() {
                    [d, Arg::Sink] => vec![self.kernel.arg_name(*d)],
                    both => both.iter().map(|&d| self.kernel.arg_name(d)).collect(),
                };
                format!("{}, {}", bars.join("|"), self.list(src))
            }
            Op::CpAsync { bytes, .. } => {
                let (addrs, rest) = split(src, 2);
                join(&[self.list(addrs), bytes.text().to_owned(), self.list(rest)])
            }
            Op::CpAsyncWait(pending) | Op::WgmmaWait(pending) | Op::BulkWait { pending, .. } => {
                pending.to_string()
            }
            Op::Ldmatrix { .. } => format!("{}, {}", self.braces(dst), self.list(src)),
            Op::Stmatrix { .. } => {
                let (addr, values) = split(src, 1);
                format!("{}, {}", self.list(addr), self.braces(values))
            }
            Op::Mma { shape, .. } => {
                let (a, b) = if shape == MmaShape::M16n8k8 { (2, 1) } else { (4, 2) };
                let (a, rest) = split(src, a);
                let (b, c) = split(rest, b);
                join(&[self.braces(dst), self.braces(a), self.braces(b), self.braces(c)])
            }
            Op::Wgmma(w) => self.wgmma_operands(&w),
            Op::SetMaxNReg { count, .. } => count.to_string(),
            Op::TensorLoad { dims, .. } => {
                let (addr, rest) = split(src, 1);
                let (map, rest) = split(rest, 1 + dims.count());
                join(&[self.list(addr), self.tensor(map), self.list(rest)])
            }
            Op::TensorStore { dims, .. }
            | Op::TensorReduce { dims, .. }
            | Op::TensorPrefetch { dims, .. } => {
                let (map, rest) = split(src, 1 + dims.count());
                join(&[self.tensor(map), self.list(rest)])
            }
            _ => join(&[self.list(dst), self.list(src)]),
        }
    }

    fn wgmma_operands(&self, w: &Wgmma) -> String {
        let sign = |negate| if negate { "-1" } else { "1" };
        let (a, rest) = split(&self.inst.src, if w.a_in_regs { 4 } else { 1 });
        let a = if w.a_in_regs { self.braces(a) } else { self.list(a) };
        let mut parts = vec![self.braces(&self.inst.dst), a, self.list(rest)];
        parts.extend([sign(w.negate_a).to_owned(), sign(w.negate_b).to_owned()]);
        if w.a.bits() == 16 {
            if !w.a_in_regs {
                parts.push(u8::from(w.trans_a).to_string());
            }
            parts.push(u8::from(w.trans_b).to_string());
        }
        join(&parts)
    }

    /// `[map, {c0, c1}]`
    fn tensor(&self, args: &[Arg]) -> String {
        let (map, coordinates) = split(args, 1);
        let map = map.first().map_or_else(String::new, |&a| self.kernel.symbol(a));
        format!("[{map}, {}]", self.braces(coordinates))
    }

    fn vector(&self, args: &[Arg], width: Width) -> String {
        if width == Width::V1 { self.list(args) } else { self.braces(args) }
    }

    fn braces(&self, args: &[Arg]) -> String {
        format!("{{{}}}", self.list(args))
    }

    fn list(&self, args: &[Arg]) -> String {
        args.iter().map(|&a| self.kernel.arg_name(a)).collect::<Vec<_>>().join(", ")
    }
}

/// The first `count` of a list, and the rest; shorter where the list is.
fn split(args: &[Arg], count: usize) -> (&[Arg], &[Arg]) {
    args.split_at(count.min(args.len()))
}

/// The non-empty parts, with commas.
fn join(parts: &[String]) -> String {
    parts.iter().filter(|p| !p.is_empty()).cloned().collect::<Vec<_>>().join(", ")
}

/// A constant: floats by their bits, small integers in decimal, masks in hexadecimal.
fn constant(imm: Imm) -> String {
    const SMALL: u64 = 1 << 16;
    match imm.class {
        RegClass::F32 => format!("0f{:08X}", imm.bits as u32),
        RegClass::B32 if imm.bits >= (1 << 32) - SMALL && imm.bits != 0xffff_ffff => {
            (imm.bits as u32).cast_signed().to_string()
        }
        RegClass::B64 if imm.bits >= u64::MAX - SMALL => imm.bits.cast_signed().to_string(),
        _ if imm.bits < SMALL => imm.bits.to_string(),
        _ => format!("{:#x}", imm.bits),
    }
}
