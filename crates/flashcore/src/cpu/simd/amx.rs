//! AMX: products of small matrices of bf16, summed in f32, and a model of its instructions for CPUs without it.

use std::arch::asm;

/// Rows of a matrix register, and words of 32 bits in each of them.
pub(in crate::cpu) const SIDE: usize = 16;
/// Bytes of a row.
pub(in crate::cpu) const ROW: usize = 4 * SIDE;
/// Bytes of a matrix register.
pub(in crate::cpu) const MATRIX: usize = SIDE * ROW;

/// Eight matrix registers of sixteen rows of sixteen words, numbered from 0, as one thread has them.
///
/// # Safety
/// `new` requires a CPU and a system that have them ([`is_available`]). Loads and stores take sixteen rows of 64 bytes, so
/// many bytes apart.
pub(in crate::cpu) trait Matrices {
    /// Takes the registers; dropping gives them back.
    unsafe fn new() -> Self;
    /// Fills a register with zeros.
    unsafe fn zero<const R: u8>(&mut self);
    /// Reads a register.
    unsafe fn load<const R: u8>(&mut self, from: *const u8, stride: usize);
    /// Writes a register.
    unsafe fn store<const R: u8>(&mut self, to: *mut u8, stride: usize);
    /// C += A B, of f32 in C and pairs of bf16 in A and B: word n of row m of C gains, for each k, both products of the pair
    /// k of row m of A and the pair n of row k of B.
    unsafe fn dot<const C: u8, const A: u8, const B: u8>(&mut self);
}

/// The CPU's own.
pub(in crate::cpu) struct Amx(());

/// What `ldtilecfg` reads: every register is of sixteen rows of 64 bytes.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

static SHAPES: Shapes = {
    let mut shapes =
        Shapes { palette: 1, start_row: 0, reserved: [0; 14], bytes_per_row: [0; 16], rows: [0; 16] };
    let mut register = 0;
    while register < 8 {
        (shapes.bytes_per_row[register], shapes.rows[register]) = (ROW as u16, SIDE as u8);
        register += 1;
    }
    shapes
};

// SAFETY (of all blocks below): the trait requires a CPU with AMX, and rows that can be read or written.
#[allow(clippy::undocumented_unsafe_blocks)] // One reason for all of these one-liners, stated above.
impl Matrices for Amx {
    #[inline(always)]
    unsafe fn new() -> Self {
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const SHAPES, options(nostack, preserves_flags)) };
        Self(())
    }
    #[inline(always)]
    unsafe fn zero<const R: u8>(&mut self) {
        unsafe { asm!("tilezero tmm{}", const R, options(nostack, nomem, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn load<const R: u8>(&mut self, from: *const u8, stride: usize) {
        unsafe {
            asm!(
                "tileloadd tmm{}, [{} + {}*1]",
                const R, in(reg) from, in(reg) stride,
                options(nostack, readonly, preserves_flags)
            );
        }
    }
    #[inline(always)]
    unsafe fn store<const R: u8>(&mut self, to: *mut u8, stride: usize) {
        unsafe {
            asm!(
                "tilestored [{} + {}*1], tmm{}",
                in(reg) to, in(reg) stride, const R,
                options(nostack, preserves_flags)
            );
        }
    }
    #[inline(always)]
    unsafe fn dot<const C: u8, const A: u8, const B: u8>(&mut self) {
        unsafe {
            asm!(
                "tdpbf16ps tmm{}, tmm{}, tmm{}",
                const C, const A, const B,
                options(nostack, nomem, preserves_flags)
            );
        }
    }
}

impl Drop for Amx {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: whoever made it has AMX.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

/// Whether this CPU has AMX with bf16 and the AVX-512 that the engine uses beside it, and the system lets this process use it,
/// which has to be asked for once.
pub(in crate::cpu) fn is_available() -> bool {
    use std::sync::OnceLock;
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| is_x86_feature_detected!("avx512f") && cpu_has_it() && system_allows_it())
}

/// By leaf 7 of `cpuid`: AMX-BF16 and AMX-TILE.
fn cpu_has_it() -> bool {
    use std::arch::x86_64::{__cpuid_count, __get_cpuid_max};
    const BITS: u32 = 1 << 22 | 1 << 24;
    // Every CPU of this architecture has `cpuid`.
    __get_cpuid_max(0).0 >= 7 && __cpuid_count(7, 0).edx & BITS == BITS
}

/// Asks Linux for the registers, for all threads of the process. It refuses where it does not know them.
#[cfg(target_os = "linux")]
fn system_allows_it() -> bool {
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let result: isize;
    // SAFETY: the call takes two numbers and touches no memory of this process.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _, lateout("r11") _,
            options(nostack)
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn system_allows_it() -> bool {
    false
}

/// Floating-point operations of one [`dot`](Matrices::dot).
pub(in crate::cpu) const DOT_FLOPS: usize = 2 * SIDE * SIDE * 2 * SIDE;

/// Runs so many dot products that never leave the registers, a multiple of four, on the CPU's own or, in tests, on the model.
///
/// # Safety
/// Requires AMX, but for tests.
pub(in crate::cpu) unsafe fn dots(count: usize) {
    unsafe fn on<M: Matrices>(count: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut registers = M::new();
            for _ in 0..count / 4 {
                registers.dot::<0, 4, 6>();
                registers.dot::<1, 4, 7>();
                registers.dot::<2, 5, 6>();
                registers.dot::<3, 5, 7>();
            }
        }
    }
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(test)]
        if !is_available() {
            return on::<Model>(count);
        }
        on::<Amx>(count);
    }
}

/// The instructions as Intel's manual defines them, in plain loops.
#[cfg(test)]
pub(in crate::cpu) struct Model {
    words: [[[u32; SIDE]; SIDE]; 8],
}

#[cfg(test)]
// SAFETY (of all blocks below): the trait requires rows that can be read or written.
#[allow(clippy::undocumented_unsafe_blocks)] // One reason for all of them, stated above.
impl Matrices for Model {
    unsafe fn new() -> Self {
        Self { words: [[[0; SIDE]; SIDE]; 8] }
    }
    unsafe fn zero<const R: u8>(&mut self) {
        self.words[usize::from(R)] = [[0; SIDE]; SIDE];
    }
    unsafe fn load<const R: u8>(&mut self, from: *const u8, stride: usize) {
        for (i, row) in self.words[usize::from(R)].iter_mut().enumerate() {
            *row = unsafe { from.add(i * stride).cast::<[u32; SIDE]>().read_unaligned() };
        }
    }
    unsafe fn store<const R: u8>(&mut self, to: *mut u8, stride: usize) {
        for (i, row) in self.words[usize::from(R)].iter().enumerate() {
            unsafe { to.add(i * stride).cast::<[u32; SIDE]>().write_unaligned(*row) };
        }
    }
    unsafe fn dot<const C: u8, const A: u8, const B: u8>(&mut self) {
        // Numbers below the normal ones count as zeros, on the way in and out.
        let flushed = |x: f32| if x.is_subnormal() { 0.0 * x } else { x };
        let pair = |word: u32| [word << 16, word & 0xffff_0000].map(|bits| flushed(f32::from_bits(bits)));
        let [a, b] = [A, B].map(|register| self.words[usize::from(register)].map(|row| row.map(pair)));
        for (row, a) in self.words[usize::from(C)].iter_mut().zip(&a) {
            let mut sums = [[0.0; 2]; SIDE];
            for (a, b) in a.iter().zip(&b) {
                for (sums, b) in sums.iter_mut().zip(b) {
                    for i in 0..2 {
                        // Products of two bf16 are exact.
                        sums[i] = flushed(sums[i] + a[i] * b[i]);
                    }
                }
            }
            for (c, [even, odd]) in row.iter_mut().zip(sums) {
                *c = flushed(flushed(f32::from_bits(*c)) + flushed(even + odd)).to_bits();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C += A B by loops over the elements of the matrices, of small whole numbers.
    #[test]
    fn the_model_multiplies_pairs_along_the_rows_of_a_and_down_the_columns_of_b() {
        let a = |m: usize, k: usize| ((m * 7 + k * 3) % 11) as f32 - 5.0;
        let b = |k: usize, n: usize| ((k * 5 + n * 2) % 7) as f32 - 3.0;
        let word = |low: f32, high: f32| low.to_bits() >> 16 | high.to_bits();
        let (mut left, mut right) = ([[0; SIDE]; SIDE], [[0; SIDE]; SIDE]);
        for i in 0..SIDE {
            for j in 0..SIDE {
                left[i][j] = word(a(i, 2 * j), a(i, 2 * j + 1));
                right[i][j] = word(b(2 * i, j), b(2 * i + 1, j));
            }
        }
        let mut result = [[f32::NAN; SIDE]; SIDE];
        // SAFETY: the matrices are of sixteen rows of 64 bytes.
        unsafe { twice::<Model>(left.as_ptr().cast(), right.as_ptr().cast(), result.as_mut_ptr().cast()) };
        for (m, row) in result.iter().enumerate() {
            for (n, &sum) in row.iter().enumerate() {
                let once: f32 = (0..2 * SIDE).map(|k| a(m, k) * b(k, n)).sum();
                assert_eq!(sum, 2.0 * once, "row {m}, column {n}");
            }
        }
    }

    /// Two products onto zeros, from registers of different numbers.
    unsafe fn twice<M: Matrices>(a: *const u8, b: *const u8, c: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut registers = M::new();
            registers.zero::<3>();
            registers.load::<4>(a, ROW);
            registers.load::<7>(b, ROW);
            registers.dot::<3, 4, 7>();
            registers.store::<3>(c, ROW);
            registers.load::<0>(c, ROW);
            registers.dot::<0, 4, 7>();
            registers.store::<0>(c, ROW);
        }
    }

    #[test]
    fn the_instructions_do_what_the_model_does() {
        if !is_available() {
            eprintln!("skipped: this CPU or system has no AMX");
            return;
        }
        let mut state = 1_u32;
        // Small whole numbers, whose sums are exact in any order; and some below the normal ones, which count as zeros.
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let number = |bits: u32| match bits & 31 {
                0 => 1,
                bits => (bits as f32 - 16.0).to_bits() >> 16,
            };
            number(state >> 24) | number(state >> 16) << 16
        };
        for _ in 0..100 {
            let [a, b] = [(); 2].map(|()| std::array::from_fn::<u32, { SIDE * SIDE }, _>(|_| random()));
            let (mut ours, mut exact) = ([0_u32; SIDE * SIDE], [0_u32; SIDE * SIDE]);
            let [a, b] = [a.as_ptr().cast(), b.as_ptr().cast()];
            // SAFETY: AMX is available; the matrices are of sixteen rows of 64 bytes.
            unsafe {
                twice::<Amx>(a, b, ours.as_mut_ptr().cast());
                twice::<Model>(a, b, exact.as_mut_ptr().cast());
            }
            assert_eq!(ours, exact);
        }
    }
}
