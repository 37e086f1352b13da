//! A finished module: plain data that can be printed, checked, assembled, simulated, and edited by tests.

use std::fmt;
use std::panic::Location;

use crate::inst::{Arg, Inst, LabelId, MemBase, Op};
use crate::params::Param;
use crate::shared::SharedLayout;
use crate::types::{IsaVersion, RegClass, RegId, Target};

/// A PTX module: the unit that ptxas assembles and the driver loads.
#[derive(Clone, Debug, PartialEq)]
pub struct Module {
    /// The oldest PTX version that the text may state; [`Module::isa`] rises above it where an instruction
    /// needs more.
    pub version: IsaVersion,
    /// The target that the module is written for.
    pub target: Target,
    /// The kernels, in printing order.
    pub kernels: Vec<Kernel>,
}

impl Module {
    /// A module for a target, without kernels yet.
    pub fn new(target: Target) -> Module {
        Module { version: target.isa(), target, kernels: Vec::new() }
    }

    /// The module with one more kernel.
    pub fn with(mut self, kernel: Kernel) -> Module {
        self.kernels.push(kernel);
        self
    }

    /// The PTX version that is printed: the lowest that the target and every instruction used need.
    pub fn isa(&self) -> IsaVersion {
        let floor = self.version.max(self.target.isa());
        self.kernels.iter().map(|kernel| kernel.isa(self.target)).fold(floor, IsaVersion::max)
    }

    /// The kernel of this name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|k| k.name == name)
    }
}

/// A kernel: an `.entry` of the module.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// The name that a launcher looks up.
    pub name: String,
    /// The parameters, with their offsets in the launch buffer.
    pub params: Vec<Param>,
    /// The virtual registers; a [`RegId`] is an index.
    pub regs: Vec<RegInfo>,
    /// The shared memory, all of it dynamic: its size is [`SharedLayout::bytes`].
    pub shared: SharedLayout,
    /// `.reqntid` or `.maxntid`.
    pub threads: Option<Threads>,
    /// `.minnctapersm`.
    pub min_blocks_per_sm: Option<u32>,
    /// `.reqnctapercluster`.
    pub cluster: Option<[u32; 3]>,
    /// `.maxnreg`.
    pub max_regs: Option<u32>,
    /// The names of the sections that instructions belong to.
    pub sections: Vec<String>,
    /// The names of the labels; a [`LabelId`] is an index.
    pub labels: Vec<String>,
    /// The instructions.
    pub body: Vec<Inst>,
}

/// A virtual register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegInfo {
    /// Its class.
    pub class: RegClass,
    /// Its number among those of its class, which is part of its printed name.
    pub number: u32,
}

impl fmt::Display for RegInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.class.prefix(), self.number)
    }
}

/// What the kernel states about its block size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// Exactly this.
    Exactly([u32; 3]),
    /// At most this.
    AtMost([u32; 3]),
}

impl Threads {
    /// The number of threads, or the bound on it.
    pub fn count(self) -> u32 {
        let (Threads::Exactly(d) | Threads::AtMost(d)) = self;
        d.iter().fold(1, |count, &n| count.saturating_mul(n))
    }
}

impl Kernel {
    /// The oldest PTX version that has every instruction and directive used, on a target.
    pub fn isa(&self, target: Target) -> IsaVersion {
        let directives = if self.cluster.is_some() { IsaVersion::V7_8 } else { IsaVersion::V7_0 };
        self.body.iter().map(|inst| inst.op.isa(target)).fold(directives, IsaVersion::max)
    }

    /// The bytes of dynamic shared memory that a launch must give.
    pub fn shared_bytes(&self) -> u32 {
        self.shared.bytes()
    }

    /// The bytes of the packed parameters.
    pub fn param_bytes(&self) -> u32 {
        self.params.iter().map(|p| p.offset + p.ty.bytes()).max().unwrap_or(0)
    }

    /// A register's class and number.
    pub fn reg(&self, id: RegId) -> Option<&RegInfo> {
        self.regs.get(id.0 as usize)
    }

    /// Where in the body a label is placed.
    pub fn label_index(&self, label: LabelId) -> Option<usize> {
        self.body.iter().position(|inst| inst.op == Op::Label(label))
    }

    /// The bytes from the start of shared memory of a constant shared address.
    pub fn shared_offset(&self, arg: Arg) -> Option<i64> {
        match arg {
            Arg::Mem { base: MemBase::Shared(alloc), offset } => {
                let alloc = self.shared.allocs().get(alloc as usize)?;
                Some(i64::from(alloc.offset) + i64::from(offset))
            }
            _ => None,
        }
    }

    /// How a message should name an instruction: the section, the author's nearest comment, and
    /// the Rust line.
    pub fn describe(&self, index: usize) -> Place<'_> {
        let Some(inst) = self.body.get(index) else {
            return Place { section: None, comment: None, loc: None };
        };
        let comment = self.body[..=index]
            .iter()
            .rev()
            .take_while(|i| i.section == inst.section)
            .find_map(|i| i.comment.as_deref());
        let section = inst.section.and_then(|s| self.sections.get(s as usize)).map(String::as_str);
        Place { section, comment, loc: inst.loc }
    }
}

/// Where an instruction is, in the kernel author's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<'k> {
    /// The section.
    pub section: Option<&'k str>,
    /// The instruction's comment, or the nearest one before it in the section.
    pub comment: Option<&'k str>,
    /// The Rust line that emitted it.
    pub loc: Option<&'static Location<'static>>,
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut gap = "";
        for words in [self.section, self.comment].into_iter().flatten() {
            write!(f, "{gap}{words}")?;
            gap = ": ";
        }
        if let Some(loc) = self.loc {
            write!(f, "{}({loc})", if gap.is_empty() { "" } else { " " })?;
        }
        Ok(())
    }
}
