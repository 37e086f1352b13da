//! Schedules: the knobs of each kernel, what they ask of a target, and the text that names them.

use std::{fmt, str::FromStr};

use flashcore_ptx::{BuildErrors, Module, SharedError, Target};

use crate::{Dtype, MAX_HEAD_DIM, Order, Spec, scalar, sm80_fwd, sm80_mma, sm90_fwd};

/// A family of generated code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kernel {
    /// Without tensor cores, for any shape.
    Scalar,
    /// Tensor cores, not pipelined.
    Sm80Mma,
    /// Tensor cores with swizzled, pipelined tiles.
    Sm80Fwd,
    /// Hopper's own: `wgmma`, TMA, warp specialisation.
    Sm90Fwd,
}

impl Kernel {
    /// The ladder, first rung first.
    pub const ALL: [Kernel; 4] = [Kernel::Scalar, Kernel::Sm80Mma, Kernel::Sm80Fwd, Kernel::Sm90Fwd];

    /// The name used in the command line and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Kernel::Scalar => "scalar",
            Kernel::Sm80Mma => "sm80_mma",
            Kernel::Sm80Fwd => "sm80_fwd",
            Kernel::Sm90Fwd => "sm90_fwd",
        }
    }

    /// Whether its code runs on a target.
    pub fn runs_on(self, target: Target) -> bool {
        self != Kernel::Sm90Fwd || target == Target::Sm90a
    }

    /// The schedules to try for a spec, best first. The search goes beyond them; these were measured on an H200.
    pub fn schedules(self, spec: &Spec) -> Vec<Schedule> {
        let order = if spec.right { Order::LongestFirst } else { Order::HeadByHead };
        let fwd = |block_m, block_n, warps, stages, q_in_regs| {
            Schedule::Sm80Fwd(sm80_fwd::Schedule { block_m, block_n, warps, stages, q_in_regs, order })
        };
        match self {
            Kernel::Scalar => vec![Schedule::Scalar(scalar::Schedule { warps: 4 })],
            Kernel::Sm80Mma => {
                [64, 32, 16].map(|block_n| Schedule::Sm80Mma(sm80_mma::Schedule { block_n })).into()
            }
            Kernel::Sm80Fwd => {
                let widest = spec.head_dim.max(spec.head_dim_v);
                // Warps of 32 queries read keys and values half as often; their output fills the registers at
                // head dims over 64, and then only short key tiles fit beside it.
                let large = match widest {
                    ..=64 => vec![fwd(128, 64, 4, 2, true), fwd(128, 64, 4, 2, false)],
                    _ => {
                        vec![fwd(128, 32, 4, 3, false), fwd(128, 64, 8, if spec.right { 3 } else { 2 }, true)]
                    }
                };
                let rest = [
                    fwd(128, 64, 8, 1, false),
                    fwd(64, 64, 4, 2, true),
                    fwd(64, 64, 4, 2, false),
                    fwd(64, 64, 4, 1, false),
                    fwd(64, 32, 4, 1, false),
                ];
                large.into_iter().chain(rest).collect()
            }
            Kernel::Sm90Fwd => {
                sm90_fwd::Schedule::defaults(spec).into_iter().map(Schedule::Sm90Fwd).collect()
            }
        }
    }

    /// The first of [`Kernel::schedules`] that fits the target.
    pub fn default_schedule(self, spec: &Spec, target: Target) -> Result<Schedule, ScheduleError> {
        let mut refused = None;
        for schedule in self.schedules(spec) {
            match schedule.check(spec, target) {
                Ok(()) => return Ok(schedule),
                Err(error) => refused = Some(error),
            }
        }
        Err(refused
            .unwrap_or_else(|| ScheduleError::Malformed { reason: format!("{self} has no schedules") }))
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Kernel {
    type Err = ScheduleError;

    fn from_str(name: &str) -> Result<Self, ScheduleError> {
        Kernel::ALL.into_iter().find(|kernel| kernel.name() == name).ok_or_else(|| ScheduleError::Malformed {
            reason: format!(
                "'{name}' is not a kernel; possible are {}",
                Kernel::ALL.map(Kernel::name).join(", ")
            ),
        })
    }
}

/// The knobs of a kernel.
///
/// ```
/// use flashcore_kernels::Schedule;
/// let text = "sm80_fwd:block_m=64,block_n=64,warps=4,stages=2,q_in_regs=1,order=head";
/// let schedule: Schedule = text.parse()?;
/// assert_eq!(schedule.to_string(), text);
/// # Ok::<(), flashcore_kernels::ScheduleError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Schedule {
    /// Of [`Kernel::Scalar`].
    Scalar(scalar::Schedule),
    /// Of [`Kernel::Sm80Mma`].
    Sm80Mma(sm80_mma::Schedule),
    /// Of [`Kernel::Sm80Fwd`].
    Sm80Fwd(sm80_fwd::Schedule),
    /// Of [`Kernel::Sm90Fwd`].
    Sm90Fwd(sm90_fwd::Schedule),
}

/// What a schedule makes of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Queries a block.
    pub rows: u32,
    /// Threads a block.
    pub threads: u32,
    /// Shared memory a block.
    pub shared_bytes: u32,
    /// Which blocks there are.
    pub blocks: Blocks,
}

/// Which blocks a launch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// One for each tile of queries, in this order.
    Each(Order),
    /// A row of blocks that find their tiles themselves.
    Row {
        /// Blocks of a cluster, which share a tile.
        cluster: u32,
        /// How many stay on a multiprocessor until all tiles are done; `None`: each ends with its tile.
        resident: Option<u32>,
    },
}

impl Geometry {
    /// Tiles of queries, for so many batch entries, heads and queries.
    pub fn tiles(&self, batch: u32, heads: u32, len_q: u32) -> u64 {
        u64::from(len_q.div_ceil(self.rows)) * u64::from(heads) * u64::from(batch)
    }

    /// The grid for so many batch entries, heads and queries, on so many multiprocessors.
    pub fn grid(&self, batch: u32, heads: u32, len_q: u32, sms: u32) -> [u32; 3] {
        match self.blocks {
            Blocks::Each(order) => order.grid(len_q.div_ceil(self.rows), heads, batch),
            Blocks::Row { cluster, resident } => {
                let tiles = self.tiles(batch, heads, len_q);
                let most = resident.map_or(u64::MAX, |blocks| u64::from((sms * blocks / cluster).max(1)));
                [u32::try_from(tiles.min(most) * u64::from(cluster)).unwrap_or(u32::MAX), 1, 1]
            }
        }
    }

    /// Blocks of a cluster.
    pub fn cluster(&self) -> u32 {
        match self.blocks {
            Blocks::Each(_) => 1,
            Blocks::Row { cluster, .. } => cluster,
        }
    }
}

/// Why a schedule was refused. Nothing was emitted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// The knobs do not make a kernel, or their text does not name them.
    #[error("{reason}")]
    Malformed {
        /// What is wrong and what is possible.
        reason: String,
    },
    /// More shared memory than a block of the target can have.
    #[error(transparent)]
    Shared(#[from] SharedError),
    /// More registers than a thread can have.
    #[error(
        "about {needs} registers a thread are needed, {limit} there are: take a smaller block_n, more warps, or leave the queries in shared memory"
    )]
    Registers {
        /// The estimate.
        needs: u32,
        /// What a thread can have.
        limit: u32,
    },
    /// A head dim that the kernels do not take.
    #[error("head_dim {head_dim} and head_dim_v {head_dim_v}: possible are {possible}")]
    HeadDim {
        /// Elements of a query.
        head_dim: u32,
        /// Elements of a value.
        head_dim_v: u32,
        /// What the kernel takes.
        possible: &'static str,
    },
    /// An element type that tensor cores do not multiply exactly.
    #[error("f32: {kernel} takes f16 and bf16; scalar takes f32")]
    F32 {
        /// The kernel asked for.
        kernel: Kernel,
    },
    /// The kernel's own code is wrong; this is a fault of FlashCore.
    #[error("the kernel was built wrongly, please report this:\n{0}")]
    Build(#[from] BuildErrors),
}

/// The most registers that a thread can have.
pub(crate) const MAX_REGISTERS: u32 = 255;

/// Whether a thread can have so many registers of fragments and `others` beside them. Each kernel's number of
/// others is such that ptxas spills nothing over its schedules.
pub(crate) fn check_registers(fragments: u32, others: u32, limit: u32) -> Result<(), ScheduleError> {
    let needs = fragments + others;
    if needs > limit { Err(ScheduleError::Registers { needs, limit }) } else { Ok(()) }
}

/// Whether a spec is one for tensor cores.
fn check_tensor_cores(kernel: Kernel, spec: &Spec) -> Result<(), ScheduleError> {
    let Spec { dtype, head_dim, head_dim_v, .. } = *spec;
    if dtype == Dtype::F32 {
        return Err(ScheduleError::F32 { kernel });
    }
    let possible = |dim: u32| (8..=MAX_HEAD_DIM).contains(&dim) && dim.is_multiple_of(8);
    if possible(head_dim) && possible(head_dim_v) {
        return Ok(());
    }
    Err(ScheduleError::HeadDim { head_dim, head_dim_v, possible: "multiples of 8 from 8 to 256" })
}

impl Schedule {
    /// The kernel whose knobs these are.
    pub fn kernel(&self) -> Kernel {
        match self {
            Schedule::Scalar(_) => Kernel::Scalar,
            Schedule::Sm80Mma(_) => Kernel::Sm80Mma,
            Schedule::Sm80Fwd(_) => Kernel::Sm80Fwd,
            Schedule::Sm90Fwd(_) => Kernel::Sm90Fwd,
        }
    }

    /// Whether it fits the spec and the target, told from the knobs alone.
    pub fn check(&self, spec: &Spec, target: Target) -> Result<(), ScheduleError> {
        if !matches!(self, Schedule::Scalar(_)) {
            check_tensor_cores(self.kernel(), spec)?;
        }
        match self {
            Schedule::Scalar(schedule) => schedule.check(spec),
            Schedule::Sm80Mma(schedule) => schedule.check(spec, target),
            Schedule::Sm80Fwd(schedule) => schedule.check(spec, target),
            Schedule::Sm90Fwd(schedule) => schedule.check(spec, target),
        }
    }

    /// Rows, threads and shared memory a block.
    pub fn geometry(&self, spec: &Spec) -> Geometry {
        match self {
            Schedule::Scalar(schedule) => schedule.geometry(),
            Schedule::Sm80Mma(schedule) => schedule.geometry(spec),
            Schedule::Sm80Fwd(schedule) => schedule.geometry(spec),
            Schedule::Sm90Fwd(schedule) => schedule.geometry(spec),
        }
    }

    /// The kernel as a PTX module with one entry.
    pub fn emit(&self, spec: &Spec, target: Target) -> Result<Module, ScheduleError> {
        self.check(spec, target)?;
        let builder = match self {
            Schedule::Scalar(schedule) => schedule.emit(spec, target),
            Schedule::Sm80Mma(schedule) => schedule.emit(spec, target),
            Schedule::Sm80Fwd(schedule) => schedule.emit(spec, target),
            Schedule::Sm90Fwd(schedule) => schedule.emit(spec, target),
        };
        Ok(Module::new(target).with(builder.finish()?))
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.kernel())?;
        match self {
            Schedule::Scalar(scalar::Schedule { warps }) => write!(f, "warps={warps}"),
            Schedule::Sm80Mma(sm80_mma::Schedule { block_n }) => write!(f, "block_n={block_n}"),
            Schedule::Sm80Fwd(sm80_fwd::Schedule { block_m, block_n, warps, stages, q_in_regs, order }) => {
                let order = match order {
                    Order::HeadByHead => "head",
                    Order::LongestFirst => "longest",
                };
                write!(f, "block_m={block_m},block_n={block_n},warps={warps},stages={stages},")?;
                write!(f, "q_in_regs={},order={order}", u32::from(*q_in_regs))
            }
            Schedule::Sm90Fwd(schedule) => {
                let sm90_fwd::Schedule { warpgroups, block_n, stages, q_stages, ctas, split, .. } = *schedule;
                let sm90_fwd::Schedule { pingpong, lazy, poly, persistent, pairs, together, .. } = *schedule;
                write!(f, "warpgroups={warpgroups},block_n={block_n},stages={stages},q_stages={q_stages},")?;
                write!(f, "ctas={ctas},split={split},pingpong={},", u32::from(pingpong))?;
                write!(f, "lazy={},poly={poly},persistent={},", u32::from(lazy), u32::from(persistent))?;
                write!(f, "pairs={}", u32::from(pairs))?;
                // Most have them apart: said only where it is otherwise.
                if together { write!(f, ",together=1") } else { Ok(()) }
            }
        }
    }
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        let malformed = |reason: String| ScheduleError::Malformed { reason };
        let (kernel, knobs) = text.split_once(':').ok_or_else(|| {
            malformed(format!("'{text}' is not a schedule: write kernel:knob=value,knob=value,…"))
        })?;
        let kernel: Kernel = kernel.parse()?;
        let mut pairs = Vec::new();
        for pair in knobs.split(',').filter(|pair| !pair.is_empty()) {
            let (knob, value) = pair
                .split_once('=')
                .ok_or_else(|| malformed(format!("'{pair}' is not of the form knob=value")))?;
            pairs.push((knob, value));
        }
        let mut take = |knob: &str| -> Result<&str, ScheduleError> {
            let at = pairs.iter().position(|&(name, _)| name == knob);
            let at = at.ok_or_else(|| malformed(format!("{kernel} needs the knob {knob}")))?;
            Ok(pairs.remove(at).1)
        };
        let number = |knob: &str, value: &str| {
            value.parse::<u32>().map_err(|_| malformed(format!("{knob}={value}: a whole number is needed")))
        };
        let schedule = match kernel {
            Kernel::Scalar => Schedule::Scalar(scalar::Schedule { warps: number("warps", take("warps")?)? }),
            Kernel::Sm80Mma => {
                Schedule::Sm80Mma(sm80_mma::Schedule { block_n: number("block_n", take("block_n")?)? })
            }
            Kernel::Sm80Fwd => Schedule::Sm80Fwd(sm80_fwd::Schedule {
                block_m: number("block_m", take("block_m")?)?,
                block_n: number("block_n", take("block_n")?)?,
                warps: number("warps", take("warps")?)?,
                stages: number("stages", take("stages")?)?,
                q_in_regs: number("q_in_regs", take("q_in_regs")?)? != 0,
                order: match take("order")? {
                    "head" => Order::HeadByHead,
                    "longest" => Order::LongestFirst,
                    other => return Err(malformed(format!("order={other}: possible are head and longest"))),
                },
            }),
            Kernel::Sm90Fwd => Schedule::Sm90Fwd(sm90_fwd::Schedule {
                warpgroups: number("warpgroups", take("warpgroups")?)?,
                block_n: number("block_n", take("block_n")?)?,
                stages: number("stages", take("stages")?)?,
                q_stages: number("q_stages", take("q_stages")?)?,
                ctas: number("ctas", take("ctas")?)?,
                split: number("split", take("split")?)?,
                pingpong: number("pingpong", take("pingpong")?)? != 0,
                lazy: number("lazy", take("lazy")?)? != 0,
                poly: number("poly", take("poly")?)?,
                persistent: number("persistent", take("persistent")?)? != 0,
                pairs: number("pairs", take("pairs")?)? != 0,
                together: take("together").map_or(Ok(0), |value| number("together", value))? != 0,
            }),
        };
        match pairs.first() {
            Some((knob, _)) => Err(malformed(format!("{kernel} has no knob {knob}"))),
            None => Ok(schedule),
        }
    }
}
