//! Tensor cores: fragments of a warp (`ldmatrix`, `mma`) and of a warpgroup (`wgmma`).

use super::KernelBuilder;
use super::data::args;
use crate::inst::*;
use crate::modifiers::*;
use crate::types::*;

/// The accumulator of one `mma.sync`: four f32 registers, or two registers of f16 pairs.
pub trait MmaAccumulator: super::Destination {
    /// Its element.
    const TYPE: AccTy;
    /// New registers.
    fn fresh(k: &mut KernelBuilder) -> Self;
    /// The registers as operands.
    fn args(self) -> Vec<Arg>;
}

impl MmaAccumulator for [Reg<F32>; 4] {
    const TYPE: AccTy = AccTy::F32;
    fn fresh(k: &mut KernelBuilder) -> Self {
        k.regs()
    }
    fn args(self) -> Vec<Arg> {
        args(&self)
    }
}

impl MmaAccumulator for [Reg<B32>; 2] {
    const TYPE: AccTy = AccTy::F16;
    fn fresh(k: &mut KernelBuilder) -> Self {
        k.regs()
    }
    fn args(self) -> Vec<Arg> {
        args(&self)
    }
}

/// The register type of a `wgmma` accumulator: [`F32`], or [`B32`] for pairs of f16.
pub trait Accumulator: RegType {
    /// Its element.
    const TYPE: AccTy;
}

impl Accumulator for F32 {
    const TYPE: AccTy = AccTy::F32;
}

impl Accumulator for B32 {
    const TYPE: AccTy = AccTy::F16;
}

/// The count for `N` matrices. Where PTX has none, this does not compile.
fn count<const N: usize>() -> MatrixCount {
    const { assert!(N == 1 || N == 2 || N == 4, "ldmatrix and stmatrix move 1, 2 or 4 matrices") };
    match N {
        1 => MatrixCount::X1,
        2 => MatrixCount::X2,
        _ => MatrixCount::X4,
    }
}

/// Tensor cores of a warp.
impl KernelBuilder {
    /// Loads 1, 2 or 4 8x8 matrices of 16-bit elements from shared memory. Another number does not compile:
    ///
    /// ```compile_fail
    /// # use flashcore_ptx::*;
    /// # let mut k = KernelBuilder::new("k", Target::Sm80);
    /// let at = k.mov_b32(0);
    /// let three: [Reg<B32>; 3] = k.ldmatrix(at);
    /// ```
    #[track_caller]
    pub fn ldmatrix<const N: usize>(&mut self, addr: impl Into<Addr<B32>>) -> [Reg<B32>; N] {
        let dst = self.regs();
        let op = Op::Ldmatrix { count: count::<N>(), trans: false };
        self.emit(op, args(&dst), vec![addr.into().into()]);
        dst
    }

    /// As [`KernelBuilder::ldmatrix`], each matrix transposed.
    #[track_caller]
    pub fn ldmatrix_trans<const N: usize>(&mut self, addr: impl Into<Addr<B32>>) -> [Reg<B32>; N] {
        let dst = self.regs();
        let op = Op::Ldmatrix { count: count::<N>(), trans: true };
        self.emit(op, args(&dst), vec![addr.into().into()]);
        dst
    }

    /// Stores 1, 2 or 4 8x8 matrices of 16-bit elements to shared memory.
    #[track_caller]
    pub fn stmatrix<const N: usize>(&mut self, addr: impl Into<Addr<B32>>, values: [Reg<B32>; N]) {
        let op = Op::Stmatrix { count: count::<N>(), trans: false };
        let src = std::iter::once(addr.into().into()).chain(args(&values)).collect();
        self.emit(op, Vec::new(), src);
    }

    /// As [`KernelBuilder::stmatrix`], each matrix transposed.
    #[track_caller]
    pub fn stmatrix_trans<const N: usize>(&mut self, addr: impl Into<Addr<B32>>, values: [Reg<B32>; N]) {
        let op = Op::Stmatrix { count: count::<N>(), trans: true };
        let src = std::iter::once(addr.into().into()).chain(args(&values)).collect();
        self.emit(op, Vec::new(), src);
    }

    /// `A B + C` for 16x16 A and 16x8 B, of f16 or bf16.
    #[track_caller]
    pub fn mma_m16n8k16<C: MmaAccumulator>(
        &mut self,
        ty: MatrixTy,
        a: [Reg<B32>; 4],
        b: [Reg<B32>; 2],
        c: C,
    ) -> C {
        self.mma(MmaShape::M16n8k16, ty, ty, args(&a), args(&b), c)
    }

    /// `A B + C` for 16x8 A and 8x8 B, of f16 or bf16.
    #[track_caller]
    pub fn mma_m16n8k8<C: MmaAccumulator>(&mut self, ty: MatrixTy, a: [Reg<B32>; 2], b: Reg<B32>, c: C) -> C {
        self.mma(MmaShape::M16n8k8, ty, ty, args(&a), args(&[b]), c)
    }

    /// `A B + C` for 16x32 A and 32x8 B, of fp8.
    #[track_caller]
    pub fn mma_m16n8k32<C: MmaAccumulator>(
        &mut self,
        a_ty: MatrixTy,
        b_ty: MatrixTy,
        a: [Reg<B32>; 4],
        b: [Reg<B32>; 2],
        c: C,
    ) -> C {
        self.mma(MmaShape::M16n8k32, a_ty, b_ty, args(&a), args(&b), c)
    }

    #[track_caller]
    fn mma<C: MmaAccumulator>(
        &mut self,
        shape: MmaShape,
        a_ty: MatrixTy,
        b_ty: MatrixTy,
        a: Vec<Arg>,
        b: Vec<Arg>,
        c: C,
    ) -> C {
        let dst = C::fresh(self);
        let op = Op::Mma { shape, a: a_ty, b: b_ty, acc: C::TYPE };
        self.emit(op, dst.args(), a.into_iter().chain(b).chain(c.args()).collect());
        dst
    }
}

/// Tensor cores of a warpgroup (four warps).
impl KernelBuilder {
    /// `D = A B + D` with A and B in shared memory, by descriptors. Where `scale_d` is false, `D = A B`.
    ///
    /// Asynchronous: the accumulators may not be touched until [`KernelBuilder::wgmma_wait`] has waited for the
    /// group that [`KernelBuilder::wgmma_commit`] closed.
    #[track_caller]
    pub fn wgmma_ss<A: Accumulator>(
        &mut self,
        spec: Wgmma,
        acc: &[Reg<A>],
        a: Reg<B64>,
        b: Reg<B64>,
        scale_d: impl Into<Operand<Pred>>,
    ) {
        let spec = Wgmma { a_in_regs: false, acc: A::TYPE, ..spec };
        self.wgmma(spec, args(acc), vec![a.into()], b, scale_d.into());
    }

    /// As [`KernelBuilder::wgmma_ss`], with A in registers.
    #[track_caller]
    pub fn wgmma_rs<A: Accumulator>(
        &mut self,
        spec: Wgmma,
        acc: &[Reg<A>],
        a: [Reg<B32>; 4],
        b: Reg<B64>,
        scale_d: impl Into<Operand<Pred>>,
    ) {
        let spec = Wgmma { a_in_regs: true, acc: A::TYPE, ..spec };
        self.wgmma(spec, args(acc), args(&a), b, scale_d.into());
    }

    #[track_caller]
    fn wgmma(&mut self, spec: Wgmma, acc: Vec<Arg>, a: Vec<Arg>, b: Reg<B64>, scale_d: Operand<Pred>) {
        let src = a.into_iter().chain([b.into(), scale_d.into()]).collect();
        self.emit(Op::Wgmma(spec), acc, src);
    }

    /// Orders accesses to accumulators and A registers before the `wgmma`s that follow.
    #[track_caller]
    pub fn wgmma_fence(&mut self) {
        self.emit(Op::WgmmaFence, Vec::new(), Vec::new());
    }

    /// Closes the group of the warpgroup's `wgmma`s so far.
    #[track_caller]
    pub fn wgmma_commit(&mut self) {
        self.emit(Op::WgmmaCommit, Vec::new(), Vec::new());
    }

    /// Waits until at most `pending` of the warpgroup's groups are in flight.
    #[track_caller]
    pub fn wgmma_wait(&mut self, pending: u8) {
        self.emit(Op::WgmmaWait(pending), Vec::new(), Vec::new());
    }

    /// Takes registers from the block's pool, so that each thread of the warpgroup has this many.
    #[track_caller]
    pub fn setmaxnreg_inc(&mut self, count: u16) {
        self.setmaxnreg(true, count);
    }

    /// Gives registers back to the block's pool, so that each thread of the warpgroup has this many.
    #[track_caller]
    pub fn setmaxnreg_dec(&mut self, count: u16) {
        self.setmaxnreg(false, count);
    }

    #[track_caller]
    fn setmaxnreg(&mut self, inc: bool, count: u16) {
        self.emit(Op::SetMaxNReg { inc, count }, Vec::new(), Vec::new());
    }
}
