//! The first rung of the ladder: attention without tensor cores, as simple as it can be, for any shape. It is also the
//! fallback for what the tensor-core kernels do not take: f32, head dims that are not multiples of 8 or are above 256,
//! and memory that is not aligned to 16 bytes.
//!
//! One warp takes one query. Its lanes share the head dim: lane l holds elements l, l + 32, … of the query and of the
//! output row. For each key the lanes multiply their elements, sum over the warp, and take one step of the online
//! softmax, the same in every lane.

use flashcore_ptx::{B16, B32, B64, F32, KernelBuilder, Pred, Reg, RegType, Target};

use crate::{
    Blocks, ElementType, Family, FwdParams, Geometry, ScheduleError, Spec,
    family::schedule,
    parts::{
        softmax::{NEG_INF, SoftmaxParams},
        work::{Rows, Work},
    },
};

/// The largest head dim: a lane then holds 32 elements of the query and as many of the output.
pub const MAX_SCALAR_HEAD_DIM: u32 = 1024;

schedule! {
    /// The knobs of the scalar kernel.
    pub struct Schedule {
        /// Warps per block; each takes one query.
        pub warps: u32,
    }
}

impl Family for Schedule {
    fn geometry(self, _: &Spec) -> Geometry {
        Geometry {
            rows: self.warps,
            threads: self.warps * 32,
            shared_bytes: 0,
            blocks: Blocks::Row { cluster: 1, resident: None, parts: 1 },
        }
    }

    fn check(self, spec: &Spec, _: Target) -> Result<(), ScheduleError> {
        let Spec { head_dim, head_dim_v, .. } = *spec;
        if [head_dim, head_dim_v].iter().any(|dim| !(1..=MAX_SCALAR_HEAD_DIM).contains(dim)) {
            return Err(ScheduleError::HeadDim { head_dim, head_dim_v, possible: "1 to 1024" });
        }
        // So that 65536 registers suffice for the block at any head dim.
        if (1..=8).contains(&self.warps) {
            return Ok(());
        }
        Err(ScheduleError::malformed(format!("{} warps: possible is 1 to 8", self.warps)))
    }

    fn emit(self, spec: &Spec, target: Target) -> KernelBuilder {
        let threads = self.geometry(spec).threads;
        let mut k = KernelBuilder::new("flashcore_scalar", target).params::<FwdParams>().threads(threads);
        self.body(&mut k, spec);
        k
    }
}

impl Schedule {
    fn body(self, k: &mut KernelBuilder, spec: &Spec) {
        let work = Work::begin(k, spec, |k| Rows::find_in_row(k, self.warps));
        let softmax = SoftmaxParams::read(k, spec);

        k.section("one query a warp");
        let tid = k.tid_x();
        let warp = k.shr_u32(tid, 5u32);
        let lane = k.and_b32(tid, 31u32);
        let row = k.add_u32(work.rows.first_row, warp);
        let beyond = k.setp_ge_s32(row, work.rows.len_q);
        k.if_(beyond, |k| k.exit());

        let q_row = k.param(FwdParams::q_row);
        let query = Work::row_address(k, work.q, row, q_row);
        let q = Lanes::new(k, lane, spec.head_dim);
        let q_values = q.load(k, query, spec.dtype);
        let v_lanes = Lanes::new(k, lane, spec.head_dim_v);

        let o: Vec<Reg<F32>> = v_lanes.parts().map(|_| k.mov_f32(0.0)).collect();
        let max = k.mov_f32(NEG_INF);
        let sum = k.mov_f32(0.0);
        let end = work.band.row_end(k, row);
        let begin = work.band.row_begin(k, row).unwrap_or_else(|| k.mov_b32(0));
        let k_row = k.param(FwdParams::k_row);
        let v_row = k.param(FwdParams::v_row);
        let key_address = Work::row_address(k, work.k, begin, k_row);
        let value_address = Work::row_address(k, work.v, begin, v_row);

        k.section("for each key: score, softmax step, output");
        k.for_s32(begin, end, 1, |k, _, _| {
            let key = q.load(k, key_address, spec.dtype);
            let mut dot = k.mul_f32(q_values[0], key[0]);
            for (&a, &b) in q_values.iter().zip(&key).skip(1) {
                dot = k.fma_f32(a, b, dot);
            }
            for distance in [16u32, 8, 4, 2, 1] {
                let other = k.shfl_bfly(dot, distance);
                dot = k.add_f32(dot, other);
            }
            let score = dot;
            softmax.score(k, &[score]);
            let new_max = k.max_f32(max, score);
            let reference = SoftmaxParams::reference(k, new_max, false);
            let rescale = softmax.exp(k, max, reference);
            let p = softmax.exp(k, score, reference);
            k.set(max, |k| k.mov_f32(new_max));
            k.set(sum, |k| k.fma_f32(sum, rescale, p));
            let value = v_lanes.load(k, value_address, spec.dtype);
            for (&o, &x) in o.iter().zip(&value) {
                let kept = k.mul_f32(o, rescale);
                k.set(o, |k| k.fma_f32(p, x, kept));
            }
            k.set(key_address, |k| k.add_u64(key_address, k_row));
            k.set(value_address, |k| k.add_u64(value_address, v_row));
        });

        k.section("write the row");
        let inverse = SoftmaxParams::inverse(k, sum);
        let o_row = k.param(FwdParams::o_row);
        let o_head = work.rows.o(k);
        let out = Work::row_address(k, o_head, row, o_row);
        let address = v_lanes.address(k, out, spec.dtype);
        for (part, &o) in v_lanes.parts().zip(&o) {
            let x = k.mul_f32(o, inverse);
            let at = address.at(part_offset(part, spec.dtype));
            let store = |k: &mut KernelBuilder| match spec.dtype {
                ElementType::F32 => k.st_global(at, x),
                ElementType::F16 => {
                    let x = k.cvt_rn_f16_f32(x);
                    k.st_global(at, x);
                }
                ElementType::Bf16 => {
                    let x = k.cvt_rn_bf16_f32(x);
                    k.st_global(at, x);
                }
                ElementType::E4m3 => unreachable!("refused before"),
            };
            match v_lanes.guard(part) {
                Some(guard) => k.when(guard, store),
                None => store(k),
            }
        }
        if spec.lse {
            let lse = work.rows.lse(k);
            let lse_row = k.param(FwdParams::lse_row);
            let address = Work::row_address(k, lse, row, lse_row);
            let value = softmax.lse(k, max, sum, 0.0);
            let first = k.setp_eq_u32(lane, 0u32);
            k.when(first, |k| k.st_global(address, value));
        }
    }
}

/// How the lanes of a warp share the elements of a row: lane l has l, l + 32, …
struct Lanes {
    lane: Reg<B32>,
    count: u32,
    /// True in the lanes that have an element in the last part; `None` where all have one.
    in_last: Option<Reg<Pred>>,
}

impl Lanes {
    fn new(k: &mut KernelBuilder, lane: Reg<B32>, count: u32) -> Self {
        let in_last = (!count.is_multiple_of(32)).then(|| k.setp_lt_u32(lane, count % 32));
        Self { lane, count, in_last }
    }

    fn parts(&self) -> std::ops::Range<u32> {
        0..self.count.div_ceil(32)
    }

    fn guard(&self, part: u32) -> Option<Reg<Pred>> {
        self.in_last.filter(|_| part + 1 == self.parts().end)
    }

    /// Where this lane's first element of the row at an address is.
    fn address(&self, k: &mut KernelBuilder, row: Reg<B64>, dtype: ElementType) -> Reg<B64> {
        k.mad_wide_u32(self.lane, dtype.size(), row)
    }

    /// This lane's elements of the row at an address, as f32; 0 where it has none.
    fn load(&self, k: &mut KernelBuilder, row: Reg<B64>, dtype: ElementType) -> Vec<Reg<F32>> {
        let address = self.address(k, row, dtype);
        self.parts()
            .map(|part| {
                let (at, guard) = (address.at(part_offset(part, dtype)), self.guard(part));
                match dtype {
                    ElementType::F32 => element(k, guard, |k| k.mov_f32(0.0), |k| k.ld_global(at)),
                    ElementType::F16 => {
                        let half = element(k, guard, |k| k.mov_b16(0u16), |k| k.ld_global::<B16>(at));
                        k.cvt_f32_f16(half)
                    }
                    ElementType::Bf16 => {
                        let half = element(k, guard, |k| k.mov_b16(0u16), |k| k.ld_global::<B16>(at));
                        let low = k.mov_b16(0u16);
                        let bits = k.pack_b32(low, half);
                        k.f32_from_bits(bits)
                    }
                    ElementType::E4m3 => unreachable!("refused before"),
                }
            })
            .collect()
    }
}

/// How far a lane's element of a part is from its first, in bytes.
fn part_offset(part: u32, dtype: ElementType) -> i32 {
    (32 * dtype.size() * part) as i32
}

/// Loads an element; with a guard, only in the lanes where it is true.
fn element<T: RegType>(
    k: &mut KernelBuilder,
    guard: Option<Reg<Pred>>,
    zero: impl FnOnce(&mut KernelBuilder) -> Reg<T>,
    load: impl FnOnce(&mut KernelBuilder) -> Reg<T>,
) -> Reg<T> {
    let Some(guard) = guard else { return load(k) };
    let value = zero(k);
    k.when(guard, |k| k.set(value, load));
    value
}
