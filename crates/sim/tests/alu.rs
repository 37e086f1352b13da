//! The plain instructions against definitions written another way, on special and random operands, with whole
//! warps and with some lanes off.

mod common;

use common::*;
use flashcore_ptx::*;
use flashcore_sim::Config;

type W = Reg<B32>;
type F = Reg<F32>;
type D = Reg<B64>;

/// Operands: pairs of special values, then random ones.
fn samples() -> Vec<[u64; 3]> {
    let special: [u32; 24] = [
        0,
        1,
        2,
        31,
        32,
        33,
        0x7FFF_FFFF,
        0x8000_0000,
        0xFFFF_FFFF,
        0x3F80_0000, // 1.0
        0xBF80_0000, // -1.0
        0x3F00_0000, // 0.5
        0x4020_0000, // 2.5
        0x7F80_0000, // infinity
        0xFF80_0000, // -infinity
        0x7FC0_0000, // NaN
        0x0000_0001, // the smallest subnormal
        0x807F_FFFF, // the largest negative subnormal
        0x0080_0000, // the smallest normal
        0x7F7F_FFFF, // the largest
        0x3C00_3C00, // halves of 1
        0x7BFF_FBFF, // the largest halves
        0x4F80_0000, // 2^32
        0xC1A8_0000, // -21
    ];
    let mut out = Vec::new();
    for (i, &a) in special.iter().enumerate() {
        for &b in &special {
            let c = special[(i * 7 + 3) % special.len()];
            out.push([a, b, c].map(|v| u64::from(v) << 32 | u64::from(v)));
        }
    }
    let mut state = 9u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state ^ state >> 29
    };
    while out.len() < 1024 {
        out.push([next(), next(), next()]);
    }
    out
}

/// Runs `emit` on every sample in its own lane and compares with `want`. Lanes whose second operand is odd are off
/// and keep a mark.
#[track_caller]
fn check(name: &str, emit: impl Fn(&mut KernelBuilder, D, D, D) -> D, want: impl Fn(u64, u64, u64) -> u64) {
    on_samples(name, &emit, &want);
}

#[track_caller]
fn on_samples(
    name: &str,
    emit: &dyn Fn(&mut KernelBuilder, D, D, D) -> D,
    want: &dyn Fn(u64, u64, u64) -> u64,
) {
    const MARK: u64 = 0x1234_5678_9ABC_DEF0;
    let samples = samples();
    let x: Vec<u8> = samples.iter().flatten().flat_map(|v| v.to_le_bytes()).collect();
    for masked in [false, true] {
        let module = kernel(256, SharedLayout::new(), Target::Sm90, |k| {
            let (x, y, tid, block) = (k.param(Io::x), k.param(Io::y), k.tid_x(), k.ctaid_x());
            let i = k.mad_lo_u32(block, 256, tid);
            let px = k.mad_wide_u32(i, 24, x);
            let [a, b, c] = std::array::from_fn(|j| k.ld_global::<B64>(px.at(8 * j as i32)));
            let out = k.mov_b64(MARK);
            if masked {
                let low = k.and_b64(b, 1u64);
                let even = k.setp_eq_u64(low, 0u64);
                k.if_(even, |k| {
                    let v = emit(k, a, b, c);
                    k.set(out, |k| k.mov_b64(v));
                });
            } else {
                let v = emit(k, a, b, c);
                k.set(out, |k| k.mov_b64(v));
            }
            let py = k.mad_wide_u32(i, 8, y);
            k.st_global(py, out);
        });
        let outcome = run(&module, samples.len() as u32 / 256, &x, 8 * samples.len(), 0, Config::default());
        assert_clean(&outcome, &Config::default());
        for (sample, bytes) in samples.iter().zip(outcome.y.chunks_exact(8)) {
            let got = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            let [a, b, c] = *sample;
            let want = if masked && b % 2 == 1 { MARK } else { want(a, b, c) };
            assert_eq!(got, want, "{name} of {a:#x} {b:#x} {c:#x}: {got:#x}, not {want:#x}");
        }
    }
}

/// For instructions on 32-bit words.
#[track_caller]
fn words(name: &str, emit: impl Fn(&mut KernelBuilder, W, W, W) -> W, want: impl Fn(u32, u32, u32) -> u32) {
    check(
        name,
        |k, a, b, c| {
            let [a, b, c] = [a, b, c].map(|v| k.cvt_u32_u64(v));
            let d = emit(k, a, b, c);
            k.cvt_u64_u32(d)
        },
        |a, b, c| u64::from(want(a as u32, b as u32, c as u32)),
    );
}

/// For instructions on floats; any NaN is the canonical one.
#[track_caller]
fn floats(name: &str, emit: impl Fn(&mut KernelBuilder, F, F, F) -> F, want: impl Fn(f32, f32, f32) -> f32) {
    words(
        name,
        |k, a, b, c| {
            let [a, b, c] = [a, b, c].map(|v| k.f32_from_bits(v));
            let d = emit(k, a, b, c);
            k.f32_to_bits(d)
        },
        |a, b, c| {
            let d = want(f32::from_bits(a), f32::from_bits(b), f32::from_bits(c));
            if d.is_nan() { 0x7FFF_FFFF } else { d.to_bits() }
        },
    );
}

/// A bit of a word.
fn bit(x: u64, i: u32) -> u64 {
    if i < 64 { x >> i & 1 } else { 0 }
}

#[test]
fn integer_arithmetic_of_32_bits() {
    let s = |v: u32| i128::from(v as i32);
    let u = |v: u32| i128::from(v);
    words("add", |k, a, b, _| k.add_u32(a, b), |a, b, _| (u(a) + u(b)) as u32);
    words("add.s32", |k, a, b, _| k.add_s32(a, b), |a, b, _| (s(a) + s(b)) as u32);
    words("sub", |k, a, b, _| k.sub_u32(a, b), |a, b, _| (u(a) - u(b)) as u32);
    words("sub.s32", |k, a, b, _| k.sub_s32(a, b), |a, b, _| (s(a) - s(b)) as u32);
    words("mul.lo", |k, a, b, _| k.mul_lo_u32(a, b), |a, b, _| (u(a) * u(b)) as u32);
    words("mul.lo.s32", |k, a, b, _| k.mul_lo_s32(a, b), |a, b, _| (s(a) * s(b)) as u32);
    words("mul.hi.u32", |k, a, b, _| k.mul_hi_u32(a, b), |a, b, _| ((u(a) * u(b)) >> 32) as u32);
    words("mul.hi.s32", |k, a, b, _| k.mul_hi_s32(a, b), |a, b, _| ((s(a) * s(b)) >> 32) as u32);
    words("mad.lo", |k, a, b, c| k.mad_lo_u32(a, b, c), |a, b, c| (u(a) * u(b) + u(c)) as u32);
    words("mad.lo.s32", |k, a, b, c| k.mad_lo_s32(a, b, c), |a, b, c| (s(a) * s(b) + s(c)) as u32);
    words("div.u32", |k, a, b, _| k.div_u32(a, b), |a, b, _| if b == 0 { !0 } else { (u(a) / u(b)) as u32 });
    words("rem.u32", |k, a, b, _| k.rem_u32(a, b), |a, b, _| if b == 0 { !0 } else { (u(a) % u(b)) as u32 });
    words("div.s32", |k, a, b, _| k.div_s32(a, b), |a, b, _| if b == 0 { !0 } else { (s(a) / s(b)) as u32 });
    words("rem.s32", |k, a, b, _| k.rem_s32(a, b), |a, b, _| if b == 0 { !0 } else { (s(a) % s(b)) as u32 });
    words("min.u32", |k, a, b, _| k.min_u32(a, b), |a, b, _| u(a).min(u(b)) as u32);
    words("min.s32", |k, a, b, _| k.min_s32(a, b), |a, b, _| s(a).min(s(b)) as u32);
    words("max.u32", |k, a, b, _| k.max_u32(a, b), |a, b, _| u(a).max(u(b)) as u32);
    words("max.s32", |k, a, b, _| k.max_s32(a, b), |a, b, _| s(a).max(s(b)) as u32);
    words("neg.s32", |k, a, _, _| k.neg_s32(a), |a, _, _| (-s(a)) as u32);
    words("abs.s32", |k, a, _, _| k.abs_s32(a), |a, _, _| s(a).unsigned_abs() as u32);
}

#[test]
fn integer_arithmetic_of_64_bits_and_between_the_widths() {
    let s = |v: u64| i128::from(v as i64);
    let u = |v: u64| i128::from(v);
    let low = |k: &mut KernelBuilder, v: D| k.cvt_u32_u64(v);
    check("add.u64", |k, a, b, _| k.add_u64(a, b), |a, b, _| (u(a) + u(b)) as u64);
    check("sub.s64", |k, a, b, _| k.sub_s64(a, b), |a, b, _| (s(a) - s(b)) as u64);
    check("mul.lo.u64", |k, a, b, _| k.mul_lo_u64(a, b), |a, b, _| (u128::from(a) * u128::from(b)) as u64);
    check(
        "mul.hi.u64",
        |k, a, b, _| k.mul_hi_u64(a, b),
        |a, b, _| ((u128::from(a) * u128::from(b)) >> 64) as u64,
    );
    check(
        "mad.lo.u64",
        |k, a, b, c| k.mad_lo_u64(a, b, c),
        |a, b, c| (u128::from(a).wrapping_mul(u128::from(b)).wrapping_add(u128::from(c))) as u64,
    );
    check("div.u64", |k, a, b, _| k.div_u64(a, b), |a, b, _| a.checked_div(b).unwrap_or(!0));
    check("rem.u64", |k, a, b, _| k.rem_u64(a, b), |a, b, _| if b == 0 { !0 } else { a % b });
    check("min.s64", |k, a, b, _| k.min_s64(a, b), |a, b, _| s(a).min(s(b)) as u64);
    check("max.u64", |k, a, b, _| k.max_u64(a, b), |a, b, _| a.max(b));
    check("neg.s64", |k, a, _, _| k.neg_s64(a), |a, _, _| (-s(a)) as u64);
    check(
        "mul.wide.s32",
        |k, a, b, _| {
            let (a, b) = (low(k, a), low(k, b));
            k.mul_wide_s32(a, b)
        },
        |a, b, _| (i64::from(a as i32) * i64::from(b as i32)) as u64,
    );
    check(
        "mad.wide.u32",
        |k, a, b, c| {
            let (a, b) = (low(k, a), low(k, b));
            k.mad_wide_u32(a, b, c)
        },
        |a, b, c| ((a & 0xFFFF_FFFF) * (b & 0xFFFF_FFFF)).wrapping_add(c),
    );
    check(
        "mad.wide.s32",
        |k, a, b, c| {
            let (a, b) = (low(k, a), low(k, b));
            k.mad_wide_s32(a, b, c)
        },
        |a, b, c| ((i64::from(a as i32) * i64::from(b as i32)) as u64).wrapping_add(c),
    );
    check(
        "cvt.s64.s32",
        |k, a, _, _| {
            let a = low(k, a);
            k.cvt_s64_s32(a)
        },
        |a, _, _| i64::from(a as i32) as u64,
    );
    check(
        "cvt.sat.s32.s64",
        |k, a, _, _| {
            let d = k.cvt_sat_s32_s64(a);
            k.cvt_u64_u32(d)
        },
        |a, _, _| u64::from((a as i64).clamp(-0x8000_0000, 0x7FFF_FFFF) as u32),
    );
    check(
        "pack",
        |k, a, b, _| {
            let (a, b) = (low(k, a), low(k, b));
            k.pack_b64(a, b)
        },
        |a, b, _| a & 0xFFFF_FFFF | b << 32,
    );
}

#[test]
fn bits_shifts_and_fields() {
    words("and", |k, a, b, _| k.and_b32(a, b), |a, b, _| !(!a | !b));
    words("or", |k, a, b, _| k.or_b32(a, b), |a, b, _| !(!a & !b));
    words("xor", |k, a, b, _| k.xor_b32(a, b), |a, b, _| (a | b) & !(a & b));
    words("not", |k, a, _, _| k.not_b32(a), |a, _, _| u32::MAX - a);
    words("shl", |k, a, b, _| k.shl_b32(a, b), |a, n, _| a.checked_shl(n).unwrap_or(0));
    words("shr.u32", |k, a, b, _| k.shr_u32(a, b), |a, n, _| a.checked_shr(n).unwrap_or(0));
    words(
        "shr.s32",
        |k, a, b, _| k.shr_s32(a, b),
        |a, n, _| (a as i32).checked_shr(n).unwrap_or(if (a as i32) < 0 { -1 } else { 0 }) as u32,
    );
    words(
        "shf.l",
        |k, a, b, c| k.shf_l_wrap_b32(a, b, c),
        |lo, hi, n| ((u128::from(hi) << 32 | u128::from(lo)) << (n % 32) >> 32) as u32,
    );
    words(
        "shf.r",
        |k, a, b, c| k.shf_r_wrap_b32(a, b, c),
        |lo, hi, n| ((u64::from(hi) << 32 | u64::from(lo)) >> (n % 32)) as u32,
    );
    for table in [0x96u32, 0xE8, 0xCA, 0x01, 0x80, 0xFE] {
        words(
            "lop3",
            |k, a, b, c| k.lop3_b32(a, b, c, table),
            |a, b, c| {
                (0..32).fold(0, |d, i| {
                    let index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1;
                    d | (table >> index & 1) << i
                })
            },
        );
    }
    words(
        "bfe.u32",
        |k, a, b, c| k.bfe_u32(a, b, c),
        |a, start, len| {
            let (start, len) = (start & 255, len & 255);
            (0..32).filter(|&i| i < len && start + i <= 31).fold(0, |d, i| d | (a >> (start + i) & 1) << i)
        },
    );
    words(
        "bfe.s32",
        |k, a, b, c| k.bfe_s32(a, b, c),
        |a, start, len| {
            let (start, len) = (start & 255, len & 255);
            let sign = if len == 0 { 0 } else { a >> (start + len - 1).min(31) & 1 };
            (0..32)
                .fold(0, |d, i| d | if i < len && start + i <= 31 { a >> (start + i) & 1 } else { sign } << i)
        },
    );
    words(
        "bfi.b32",
        |k, a, b, c| k.bfi_b32(a, b, c, 7),
        |a, b, start| {
            let start = start & 255;
            (0..7)
                .filter(|i| start + i <= 31)
                .fold(b, |d, i| d & !(1 << (start + i)) | (a >> i & 1) << (start + i))
        },
    );
    check(
        "bfe.u64",
        |k, a, b, c| {
            // PTX wants start and length below 256.
            let (b, c) = (k.and_b64(b, 255u64), k.and_b64(c, 255u64));
            let (b, c) = (k.cvt_u32_u64(b), k.cvt_u32_u64(c));
            k.bfe_u64(a, b, c)
        },
        |a, start, len| {
            let (start, len) = (start as u32 & 255, len as u32 & 255);
            (0..64).filter(|&i| i < len && start + i <= 63).fold(0, |d, i| d | bit(a, start + i) << i)
        },
    );
    words(
        "prmt",
        |k, a, b, c| k.prmt_b32(a, b, c),
        |a, b, selector| {
            let bytes = [a.to_le_bytes(), b.to_le_bytes()].concat();
            let pick = |i: u32| {
                let nibble = selector >> (4 * i) & 15;
                let byte = bytes[(nibble & 7) as usize];
                if nibble & 8 == 0 {
                    byte
                } else if byte & 0x80 == 0 {
                    0
                } else {
                    0xFF
                }
            };
            u32::from_le_bytes([pick(0), pick(1), pick(2), pick(3)])
        },
    );
    words("popc", |k, a, _, _| k.popc_b32(a), |a, _, _| (0..32).map(|i| a >> i & 1).sum());
    words(
        "clz",
        |k, a, _, _| k.clz_b32(a),
        |a, _, _| (0..32).take_while(|i| a >> (31 - i) & 1 == 0).count() as u32,
    );
    words("brev", |k, a, _, _| k.brev_b32(a), |a, _, _| (0..32).fold(0, |d, i| d | (a >> i & 1) << (31 - i)));
    words(
        "bfind",
        |k, a, _, _| k.bfind_u32(a),
        |a, _, _| (0..32).rev().find(|i| a >> i & 1 == 1).unwrap_or(u32::MAX),
    );
}

#[test]
fn single_precision_is_ieee_with_canonical_nan_and_flushing_on_request() {
    let flush = |x: f32| if x.is_subnormal() { 0.0f32.copysign(x) } else { x };
    floats("add", |k, a, b, _| k.add_f32(a, b), |a, b, _| a + b);
    floats("add.ftz", |k, a, b, _| k.add_ftz_f32(a, b), |a, b, _| flush(flush(a) + flush(b)));
    floats("sub", |k, a, b, _| k.sub_f32(a, b), |a, b, _| a - b);
    floats("mul", |k, a, b, _| k.mul_f32(a, b), |a, b, _| a * b);
    floats("mul.ftz", |k, a, b, _| k.mul_ftz_f32(a, b), |a, b, _| flush(flush(a) * flush(b)));
    floats("fma", |k, a, b, c| k.fma_f32(a, b, c), f32::mul_add);
    floats(
        "fma.ftz",
        |k, a, b, c| k.fma_ftz_f32(a, b, c),
        |a, b, c| flush(flush(a).mul_add(flush(b), flush(c))),
    );
    floats(
        "min",
        |k, a, b, _| k.min_f32(a, b),
        |a, b, _| match (a.is_nan(), b.is_nan()) {
            (true, _) => b,
            (_, true) => a,
            _ if a == 0.0 && b == 0.0 => {
                if a.is_sign_negative() {
                    a
                } else {
                    b
                }
            }
            _ => {
                if a < b {
                    a
                } else {
                    b
                }
            }
        },
    );
    floats(
        "max.NaN",
        |k, a, b, _| k.max_nan_f32(a, b),
        |a, b, _| {
            if a.is_nan() || b.is_nan() {
                f32::NAN
            } else if a == 0.0 && b == 0.0 {
                if a.is_sign_negative() { b } else { a }
            } else if a > b {
                a
            } else {
                b
            }
        },
    );
    floats("div", |k, a, b, _| k.div_f32(a, b), |a, b, _| a / b);
    floats("rcp", |k, a, _, _| k.rcp_f32(a), |a, _, _| 1.0 / a);
    floats("sqrt", |k, a, _, _| k.sqrt_f32(a), |a, _, _| a.sqrt());
    floats("neg", |k, a, _, _| k.neg_f32(a), |a, _, _| -a);
    floats("abs", |k, a, _, _| k.abs_f32(a), |a, _, _| a.abs());
    words(
        "copysign",
        |k, a, b, _| {
            let (a, b) = (k.f32_from_bits(a), k.f32_from_bits(b));
            let d = k.copysign_f32(a, b);
            k.f32_to_bits(d)
        },
        |sign, magnitude, _| f32::from_bits(magnitude).copysign(f32::from_bits(sign)).to_bits(),
    );
    floats("cvt.rni", |k, a, _, _| k.cvt_rni_f32_f32(a), |a, _, _| a.round_ties_even());
    floats(
        "cvt.sat",
        |k, a, _, _| k.cvt_sat_f32_f32(a),
        |a, _, _| if a.is_nan() { 0.0 } else { a.clamp(0.0, 1.0).abs() },
    );
}

#[test]
fn functions_are_within_a_unit_in_the_last_place() {
    let close = |name: &str, emit: &dyn Fn(&mut KernelBuilder, F) -> F, want: &dyn Fn(f64) -> f64| {
        let samples = samples();
        let x: Vec<u8> = samples.iter().flat_map(|s| (s[0] as u32).to_le_bytes()).collect();
        let module = kernel(256, SharedLayout::new(), Target::Sm80, |k| {
            let (x, y, tid, block) = (k.param(Io::x), k.param(Io::y), k.tid_x(), k.ctaid_x());
            let i = k.mad_lo_u32(block, 256, tid);
            let (px, py) = (k.mad_wide_u32(i, 4, x), k.mad_wide_u32(i, 4, y));
            let a = k.ld_global::<F32>(px);
            let d = emit(k, a);
            k.st_global(py, d);
        });
        let outcome = run(&module, 4, &x, 4096, 0, Config::default());
        for (sample, got) in samples.iter().zip(outcome.f32s()) {
            let a = f32::from_bits(sample[0] as u32);
            let want = want(f64::from(a)) as f32;
            let near = (i64::from(got.to_bits()) - i64::from(want.to_bits())).abs() <= 1;
            assert!(near || (got.is_nan() && want.is_nan()), "{name}({a:e}) = {got:e}, not {want:e}");
        }
    };
    close("ex2", &|k, a| k.ex2_approx_f32(a), &f64::exp2);
    close("lg2", &|k, a| k.lg2_approx_f32(a), &f64::log2);
    close("rsqrt", &|k, a| k.rsqrt_approx_f32(a), &|a| 1.0 / a.sqrt());
    close("tanh", &|k, a| k.tanh_approx_f32(a), &f64::tanh);
    close("sin", &|k, a| k.sin_approx_f32(a), &f64::sin);
    close("cos", &|k, a| k.cos_approx_f32(a), &f64::cos);
}

#[test]
fn halves_are_rounded_once() {
    use half::{bf16, f16};
    let f16s = |v: u32| [f16::from_bits(v as u16).to_f64(), f16::from_bits((v >> 16) as u16).to_f64()];
    let canon16 = |v: f64| if v.is_nan() { 0x7FFF } else { f16::from_f64(v).to_bits() };
    let canon_b16 = |v: f64| if v.is_nan() { 0x7FFF } else { bf16::from_f64(v).to_bits() };
    let pair = |lo: u16, hi: u16| u32::from(hi) << 16 | u32::from(lo);
    words(
        "add.f16x2",
        |k, a, b, _| k.add_f16x2(a, b),
        |a, b, _| {
            let (x, y) = (f16s(a), f16s(b));
            pair(canon16(x[0] + y[0]), canon16(x[1] + y[1]))
        },
    );
    words(
        "mul.f16x2",
        |k, a, b, _| k.mul_f16x2(a, b),
        |a, b, _| {
            let (x, y) = (f16s(a), f16s(b));
            pair(canon16(x[0] * y[0]), canon16(x[1] * y[1]))
        },
    );
    words(
        "fma.f16x2",
        |k, a, b, c| k.fma_f16x2(a, b, c),
        |a, b, c| {
            let (x, y, z) = (f16s(a), f16s(b), f16s(c));
            pair(canon16(x[0] * y[0] + z[0]), canon16(x[1] * y[1] + z[1]))
        },
    );
    words(
        "cvt.f16x2",
        |k, a, b, _| {
            let (a, b) = (k.f32_from_bits(a), k.f32_from_bits(b));
            k.cvt_rn_f16x2_f32(a, b)
        },
        |hi, lo, _| pair(canon16(f64::from(f32::from_bits(lo))), canon16(f64::from(f32::from_bits(hi)))),
    );
    words(
        "cvt.bf16x2",
        |k, a, b, _| {
            let (a, b) = (k.f32_from_bits(a), k.f32_from_bits(b));
            k.cvt_rn_bf16x2_f32(a, b)
        },
        |hi, lo, _| pair(canon_b16(f64::from(f32::from_bits(lo))), canon_b16(f64::from(f32::from_bits(hi)))),
    );
    words(
        "cvt.rn.f16.s32",
        |k, a, _, _| {
            let h = k.cvt_rn_f16_s32(a);
            k.cvt_u32_u16(h)
        },
        |a, _, _| u32::from(canon16(f64::from(a as i32))),
    );
}

#[test]
fn conversions_saturate_and_send_nan_to_zero() {
    let float = |k: &mut KernelBuilder, a: W| k.f32_from_bits(a);
    let of = |a: u32| f64::from(f32::from_bits(a));
    let s32 = |v: f64| if v.is_nan() { 0 } else { v.clamp(-2_147_483_648.0, 2_147_483_647.0) as i64 as u32 };
    let u32_ = |v: f64| if v.is_nan() { 0 } else { v.clamp(0.0, 4_294_967_295.0) as u64 as u32 };
    words(
        "rni.s32",
        |k, a, _, _| {
            let a = float(k, a);
            k.cvt_rni_s32_f32(a)
        },
        |a, _, _| s32(of(a).round_ties_even()),
    );
    words(
        "rzi.s32",
        |k, a, _, _| {
            let a = float(k, a);
            k.cvt_rzi_s32_f32(a)
        },
        |a, _, _| s32(of(a).trunc()),
    );
    words(
        "rmi.s32",
        |k, a, _, _| {
            let a = float(k, a);
            k.cvt_rmi_s32_f32(a)
        },
        |a, _, _| s32(of(a).floor()),
    );
    words(
        "rpi.s32",
        |k, a, _, _| {
            let a = float(k, a);
            k.cvt_rpi_s32_f32(a)
        },
        |a, _, _| s32(of(a).ceil()),
    );
    words(
        "rni.u32",
        |k, a, _, _| {
            let a = float(k, a);
            k.cvt_rni_u32_f32(a)
        },
        |a, _, _| u32_(of(a).round_ties_even()),
    );
    words(
        "rzi.u32",
        |k, a, _, _| {
            let a = float(k, a);
            k.cvt_rzi_u32_f32(a)
        },
        |a, _, _| u32_(of(a).trunc()),
    );
    floats(
        "f32.s32",
        |k, a, _, _| {
            let a = k.f32_to_bits(a);
            k.cvt_rn_f32_s32(a)
        },
        |a, _, _| a.to_bits() as i32 as f32,
    );
    floats(
        "f32.u32",
        |k, a, _, _| {
            let a = k.f32_to_bits(a);
            k.cvt_rn_f32_u32(a)
        },
        |a, _, _| a.to_bits() as f32,
    );
}

#[test]
fn comparisons_order_integers_by_sign_and_treat_nan_as_asked() {
    type Emit = fn(&mut KernelBuilder, W, W) -> Reg<Pred>;
    let compare = |name: &str, emit: Emit, want: &dyn Fn(u32, u32) -> bool| {
        words(
            name,
            |k, a, b, _| {
                let p = emit(k, a, b);
                k.selp_b32(1u32, 0u32, p)
            },
            |a, b, _| u32::from(want(a, b)),
        );
    };
    compare("lt.u32", |k, a, b| k.setp_lt_u32(a, b), &|a, b| a < b);
    compare("lt.s32", |k, a, b| k.setp_lt_s32(a, b), &|a, b| (a as i32) < (b as i32));
    compare("ge.s32", |k, a, b| k.setp_ge_s32(a, b), &|a, b| (a as i32) >= (b as i32));
    compare("eq.u32", |k, a, b| k.setp_eq_u32(a, b), &|a, b| a == b);
    macro_rules! float {
        ($($method:ident: |$x:ident, $y:ident| $want:expr;)*) => {
            $(compare(stringify!($method), |k, a, b| {
                let (a, b) = (k.f32_from_bits(a), k.f32_from_bits(b));
                k.$method(a, b)
            }, &|a, b| {
                let ($x, $y) = (f32::from_bits(a), f32::from_bits(b));
                $want
            });)*
        };
    }
    float! {
        setp_eq_f32: |x, y| x == y;
        setp_ne_f32: |x, y| x != y && !x.is_nan() && !y.is_nan();
        setp_lt_f32: |x, y| x < y;
        setp_ge_f32: |x, y| x >= y;
        setp_neu_f32: |x, y| x != y;
        setp_ltu_f32: |x, y| x.partial_cmp(&y).is_none_or(std::cmp::Ordering::is_lt);
        setp_geu_f32: |x, y| x.partial_cmp(&y).is_none_or(std::cmp::Ordering::is_ge);
        setp_num_f32: |x, y| x.partial_cmp(&y).is_some();
        setp_nan_f32: |x, y| x.is_nan() || y.is_nan();
    }
}
