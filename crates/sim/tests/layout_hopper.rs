//! Where Hopper's copies and products find their bytes: TMA boxes and `wgmma` operands against plain loops.

mod common;

use common::*;
use flashcore_ptx::*;
use flashcore_sim::{Config, FindingKind, Swizzle, TensorElement, TensorMap};

/// One thread loads a box of `bytes` at these coordinates; then the warp copies `extent` bytes of shared memory to
/// y as they are.
fn box_kernel(rank: usize, coordinates: &[i32], bytes: u32, extent: u32) -> Module {
    let mut shared = SharedLayout::new();
    let tile = shared.alloc("tile", extent, 1024);
    let bar = shared.alloc("bar", 8, 8);
    let coordinates: Vec<Operand<B32>> = coordinates[..rank].iter().map(|&c| c.into()).collect();
    hopper(32, shared, move |k| {
        let (tid, map) = (k.tid_x(), k.tensor_map(Maps::x_map));
        let first = k.setp_eq_u32(tid, 0);
        // Bytes between short rows keep what they held.
        let base = k.shared_addr(tile);
        k.for_s32(tid, extent / 4, 32, |k, i, _| {
            let to = k.mad_lo_u32(i, 4, base);
            k.st_shared::<B32>(to, 0xEEEE_EEEEu32);
        });
        k.fence_proxy_async(ProxySpace::Shared);
        k.bar_warp_sync();
        k.if_(first, |k| {
            k.mbarrier_init(bar, 1);
            k.fence_mbarrier_init();
            k.mbarrier_arrive_expect_tx(bar, bytes);
            k.tensor_load(tile, map, &coordinates, bar, BulkHint::new());
        });
        k.bar_warp_sync();
        k.mbarrier_wait_parity(bar, 0, Scope::Cta);
        let y = k.param(Maps::y);
        k.for_s32(tid, extent / 4, 32, |k, i, _| {
            let from = k.mad_lo_u32(i, 4, base);
            let v = k.ld_shared::<B32>(from);
            let to = k.mad_wide_u32(i, 4, y);
            k.st_global(to, v);
        });
    })
}

/// Runs [`box_kernel`] with a map of a dense tensor of 16-bit numbers that count up, and checks every element.
#[track_caller]
fn check_box(dims: &[u64], box_dims: &[u32], element_strides: &[u32], coordinates: &[i32], swizzle: Swizzle) {
    let elements: u64 = dims.iter().product();
    let strides: Vec<u64> = (1..dims.len()).map(|d| dims[..d].iter().product::<u64>() * 2).collect();
    let map = |address: u64| TensorMap {
        element_strides: element_strides.to_vec(),
        ..TensorMap::new(TensorElement::U16, address, dims, &strides, box_dims).swizzled(swizzle)
    };
    let bytes = map(0).box_bytes();
    let row = 2 * box_dims[0].div_ceil(element_strides[0]);
    // Rows of a swizzled box begin a swizzle span apart.
    let pitch = if swizzle == Swizzle::None { row } else { swizzle.span() };
    let extent = bytes / row * pitch;
    let module = box_kernel(dims.len(), coordinates, bytes, extent);
    let x: Vec<u8> = (1..=elements as u16).flat_map(u16::to_le_bytes).collect();
    let taken: Vec<u32> = box_dims.iter().zip(element_strides).map(|(b, s)| b.div_ceil(*s)).collect();
    for config in policies() {
        let outcome = run_maps(&module, 1, &x, extent as usize, 0, &|x, _| (map(x), map(x)), config.clone());
        assert_clean(&outcome, &config);
        let mut filled = vec![false; extent as usize];
        for flat in 0..bytes / 2 {
            let mut rest = flat;
            let mut element = Some(0u64);
            for d in 0..dims.len() {
                let at = i64::from(coordinates[d]) + i64::from(rest % taken[d] * element_strides[d]);
                rest /= taken[d];
                let inside = at >= 0 && at < dims[d] as i64;
                element =
                    element.filter(|_| inside).map(|e| e + at as u64 * dims[..d].iter().product::<u64>());
            }
            let want = element.map_or(0, |e| e as u16 + 1);
            let place = swizzle.apply(2 * flat / row * pitch + 2 * flat % row) as usize;
            filled[place..place + 2].fill(true);
            let got = u16::from_le_bytes([outcome.y[place], outcome.y[place + 1]]);
            assert_eq!(got, want, "element {flat} of box {box_dims:?} at {coordinates:?} with {swizzle:?}");
        }
        assert!(outcome.y.iter().zip(&filled).all(|(&byte, &filled)| filled || byte == 0xEE));
    }
}

#[test]
fn a_box_lies_dense_in_shared_memory_in_one_to_five_dimensions() {
    check_box(&[256], &[64], &[1], &[32], Swizzle::None);
    check_box(&[64, 16], &[16, 8], &[1, 1], &[16, 4], Swizzle::None);
    check_box(&[16, 8, 4], &[8, 4, 2], &[1, 1, 1], &[8, 2, 1], Swizzle::None);
    check_box(&[16, 4, 3, 5], &[8, 2, 2, 2], &[1, 1, 1, 1], &[0, 1, 1, 2], Swizzle::None);
    check_box(&[8, 4, 3, 3, 2], &[8, 2, 2, 2, 2], &[1, 1, 1, 1, 1], &[0, 2, 1, 0, 0], Swizzle::None);
}

#[test]
fn elements_outside_of_the_tensor_are_zero_on_every_side() {
    check_box(&[64, 16], &[16, 8], &[1, 1], &[56, 12], Swizzle::None);
    check_box(&[64, 16], &[16, 8], &[1, 1], &[-8, -3], Swizzle::None);
    check_box(&[64, 16], &[16, 8], &[1, 1], &[1000, 0], Swizzle::None);
    check_box(&[64, 20], &[64, 16], &[1, 1], &[0, 10], Swizzle::B128);
}

#[test]
fn element_strides_take_every_so_many_elements() {
    check_box(&[64, 16], &[32, 8], &[2, 4], &[3, 1], Swizzle::None);
}

#[test]
fn every_swizzle_permutes_the_chunks_of_a_row() {
    check_box(&[64, 32], &[64, 32], &[1, 1], &[0, 0], Swizzle::B128);
    check_box(&[64, 32], &[32, 32], &[1, 1], &[32, 0], Swizzle::B64);
    check_box(&[64, 32], &[16, 32], &[1, 1], &[16, 0], Swizzle::B32);
}

#[test]
fn rows_shorter_than_the_swizzle_begin_a_span_apart() {
    check_box(&[64, 16], &[32, 16], &[1, 1], &[8, 0], Swizzle::B128);
    check_box(&[64, 16], &[48, 16], &[1, 1], &[0, 3], Swizzle::B128);
    check_box(&[64, 16], &[16, 16], &[1, 1], &[0, 0], Swizzle::B64);
    check_box(&[64, 16], &[8, 16], &[1, 1], &[0, 0], Swizzle::B32);
}

#[test]
fn a_store_writes_the_part_of_the_box_that_lies_in_the_tensor() {
    let mut shared = SharedLayout::new();
    let tile = shared.alloc("tile", 8 * 64 * 2, 1024);
    for reduce in [false, true] {
        let module = hopper(32, shared.clone(), |k| {
            let (tid, map) = (k.tid_x(), k.tensor_map(Maps::y_map));
            let base = k.shared_addr(tile);
            k.for_s32(tid, 256, 32, |k, i, _| {
                // Two ones of f16.
                let to = k.mad_lo_u32(i, 4, base);
                k.st_shared::<B32>(to, 0x3C00_3C00);
            });
            k.fence_proxy_async(ProxySpace::Shared);
            k.bar_warp_sync();
            let first = k.setp_eq_u32(tid, 0);
            k.if_(first, |k| {
                let at: [Operand<B32>; 2] = [32.into(), 4.into()];
                if reduce {
                    k.tensor_reduce(AtomOp::Add, map, &at, tile, BulkHint::new());
                } else {
                    k.tensor_store(map, &at, tile, BulkHint::new());
                }
                k.bulk_commit();
                k.bulk_wait(0);
            });
        });
        let maps = |x: u64, y: u64| {
            let target = if reduce { x } else { y };
            let map = TensorMap::new(TensorElement::F16, target, &[64, 10], &[128], &[64, 8])
                .swizzled(Swizzle::B128);
            (map.clone(), map)
        };
        let x = f16_bytes((0..640).map(|i| (i % 5) as f32));
        for config in policies() {
            let mut sim = flashcore_sim::Sim::new(config.clone());
            let (xb, yb) = (sim.alloc_from("x", &x), sim.alloc("y", 1280));
            let (x_map, y_map) = maps(xb.address, yb.address);
            let params = Maps {
                x_map: flashcore_ptx::TensorMap(x_map.encode().expect("valid")),
                y_map: flashcore_ptx::TensorMap(y_map.encode().expect("valid")),
                x: GlobalPtr(xb.address),
                y: GlobalPtr(yb.address),
                n: 0,
            };
            let dims = flashcore_sim::LaunchDims::linear(1, 32);
            let report = sim.launch(&module, "test", dims, &params.pack()).expect("possible");
            assert!(report.is_clean(), "{}", report.findings[0]);
            let out = sim.read(if reduce { xb } else { yb });
            for row in 0..10 {
                for column in 0..64 {
                    let at = 2 * (64 * row + column);
                    let got = half::f16::from_le_bytes([out[at], out[at + 1]]).to_f32();
                    let hit = row >= 4 && column >= 32;
                    if reduce {
                        let old = ((64 * row + column) % 5) as f32;
                        assert_eq!(got, if hit { old + 1.0 } else { old });
                    } else if hit {
                        assert_eq!(got, 1.0);
                    } else {
                        assert!(got.is_nan(), "row {row} column {column} was written");
                    }
                }
            }
        }
    }
}

/// An operand of `wgmma` in shared memory: its descriptor's bits (without the start address) and the byte that an
/// element lies at.
struct Operand128 {
    bits: u64,
    place: Box<dyn Fn(usize, usize) -> u32>,
    bytes: u32,
}

/// The layouts of the manual, written as nested loops would: K-major or MN-major, every swizzle. `rows` is M or N.
fn operand(rows: usize, size: usize, mn_major: bool, swizzle: Swizzle) -> Operand128 {
    let mode: u64 = match swizzle {
        Swizzle::None => 0,
        Swizzle::B128 => 1,
        Swizzle::B64 => 2,
        Swizzle::B32 => 3,
    };
    let span = swizzle.span() as usize;
    let bits =
        |leading: usize, stride: usize| mode << 62 | (stride as u64 / 16) << 32 | (leading as u64 / 16) << 16;
    let depth = 32 / size;
    match (mn_major, swizzle) {
        (false, Swizzle::None) => {
            // Core matrices of 8 rows x 16 bytes; the next along k after all rows.
            let (stride, leading) = (128, rows * 16);
            let place = move |row: usize, k: usize| {
                (row / 8 * stride + row % 8 * 16 + k * size / 16 * leading + k * size % 16) as u32
            };
            Operand128 { bits: bits(leading, stride), place: Box::new(place), bytes: (rows * 32) as u32 }
        }
        (false, _) => {
            let stride = 8 * span;
            let place = move |row: usize, k: usize| {
                swizzle.apply((row / 8 * stride + row % 8 * span + k * size) as u32)
            };
            Operand128 {
                bits: bits(16, stride),
                place: Box::new(place),
                bytes: (rows.div_ceil(8) * stride) as u32,
            }
        }
        (true, Swizzle::None) => {
            // Core matrices of 8 k x 8 elements.
            let (stride, leading) = (depth / 8 * 128, 128);
            let place = move |row: usize, k: usize| {
                (row / 8 * stride + k / 8 * leading + k % 8 * 16 + row % 8 * size) as u32
            };
            Operand128 {
                bits: bits(leading, stride),
                place: Box::new(place),
                bytes: (rows / 8 * stride) as u32,
            }
        }
        (true, _) => {
            // Panels of span bytes of rows, each with all of k.
            let wide = span / size;
            let (stride, leading) = (8 * span, depth * span);
            let place = move |row: usize, k: usize| {
                let plain = row / wide * leading + k / 8 * stride + k % 8 * span + row % wide * size;
                swizzle.apply(plain as u32)
            };
            Operand128 {
                bits: bits(leading, stride),
                place: Box::new(place),
                bytes: (rows.div_ceil(wide) * leading) as u32,
            }
        }
    }
}

fn encode(ty: MatrixTy, value: f32) -> Vec<u8> {
    use flashcore_sim::numerics as num;
    match ty {
        MatrixTy::F16 => num::f32_to_f16(value).to_le_bytes().to_vec(),
        MatrixTy::Bf16 => num::f32_to_bf16(value).to_le_bytes().to_vec(),
        MatrixTy::E4m3 => vec![num::f32_to_e4m3(value)],
        MatrixTy::E5m2 => vec![num::f32_to_e5m2(value)],
    }
}

struct Product {
    n: u16,
    a: MatrixTy,
    b: MatrixTy,
    a_layout: Option<(bool, Swizzle)>,
    b_layout: (bool, Swizzle),
    half_accumulator: bool,
    negate_b: bool,
}

/// Runs one product with both operands in the layouts given, or A in registers, and checks every element of D.
#[track_caller]
fn check_product(p: &Product) {
    let n = usize::from(p.n);
    let size = p.a.bits() as usize / 8;
    let depth = 32 / size;
    let value_a = |i: usize, k: usize| small(17 * i + 3 * k);
    let value_b = |j: usize, k: usize| small(5 * j + 11 * k + 2);
    // x holds the image of shared memory: A, then B, then the A fragments.
    let a_operand = p.a_layout.map(|(mn, s)| operand(64, size, mn, s));
    let b_operand = operand(n, size, p.b_layout.0, p.b_layout.1);
    let a_bytes = a_operand.as_ref().map_or(0, |a| a.bytes).next_multiple_of(1024);
    let b_bytes = b_operand.bytes.next_multiple_of(1024);
    let mut image = vec![0u8; (a_bytes + b_bytes) as usize];
    let mut put = |base: u32, o: &Operand128, rows: usize, ty, value: &dyn Fn(usize, usize) -> f32| {
        for row in 0..rows {
            for k in 0..depth {
                let at = (base + (o.place)(row, k)) as usize;
                image[at..at + size].copy_from_slice(&encode(ty, value(row, k)));
            }
        }
    };
    if let Some(a) = &a_operand {
        put(0, a, 64, p.a, &value_a);
    }
    put(a_bytes, &b_operand, n, p.b, &value_b);
    // Fragment register r of thread t: rows g and g + 8 alternate, then k goes on.
    let per = 4 / size;
    let mut fragments = Vec::new();
    for r in 0..4 {
        for thread in 0..128 {
            let (warp, g, t) = (thread / 32, thread % 32 / 4, thread % 4);
            for i in 0..per {
                let (row, k) = (16 * warp + g + 8 * (r % 2), per * t + i + r / 2 * 4 * per);
                fragments.extend(encode(p.a, value_a(row, k)));
            }
        }
    }
    let image_words = image.len() as u32 / 4;
    let mut x = image;
    x.extend(fragments);

    let mut shared = SharedLayout::new();
    let tile = shared.alloc("operands", a_bytes + b_bytes, 1024);
    let spec = Wgmma {
        b: p.b,
        trans_a: p.a_layout.is_some_and(|(mn, _)| mn),
        trans_b: p.b_layout.0,
        negate_b: p.negate_b,
        ..Wgmma::new(p.n, p.a)
    };
    let registers = if p.half_accumulator { n / 4 } else { n / 2 };
    let module = hopper(128, shared, |k| {
        let (tid, x, y) = (k.tid_x(), k.param(Maps::x), k.param(Maps::y));
        let base = k.shared_addr(tile);
        k.for_s32(tid, image_words, 128, |k, i, _| {
            let (from, to) = (k.mad_wide_u32(i, 4, x), k.mad_lo_u32(i, 4, base));
            let v = k.ld_global::<B32>(from);
            k.st_shared(to, v);
        });
        k.fence_proxy_async(ProxySpace::Shared);
        k.bar_sync_all();
        let px = k.mad_wide_u32(tid, 4, x);
        let a: [Reg<B32>; 4] =
            std::array::from_fn(|r| k.ld_global(px.at((4 * image_words) as i32 + 512 * r as i32)));
        let desc = |k: &mut KernelBuilder, offset: u32, bits: u64| {
            let at = k.add_u32(base, offset);
            let start = k.shr_u32(at, 4);
            let low = k.or_b32(start, bits as u32);
            k.pack_b64(low, (bits >> 32) as u32)
        };
        let db = desc(k, a_bytes, b_operand.bits);
        let da = a_operand.as_ref().map(|a| desc(k, 0, a.bits));
        let floats: Vec<Reg<F32>> = if p.half_accumulator { Vec::new() } else { k.reg_vec(registers) };
        let pairs: Vec<Reg<B32>> = if p.half_accumulator { k.reg_vec(registers) } else { Vec::new() };
        k.wgmma_fence();
        match (da, p.half_accumulator) {
            (Some(da), false) => k.wgmma_ss(spec, &floats, da, db, false),
            (Some(da), true) => k.wgmma_ss(spec, &pairs, da, db, false),
            (None, false) => k.wgmma_rs(spec, &floats, a, db, false),
            (None, true) => k.wgmma_rs(spec, &pairs, a, db, false),
        }
        k.wgmma_commit();
        k.wgmma_wait(0);
        let py = k.mad_wide_u32(tid, 4, y);
        for r in 0..registers {
            let word = if p.half_accumulator { pairs[r] } else { k.f32_to_bits(floats[r]) };
            k.st_global(py.at(512 * r as i32), word);
        }
    });
    let maps = |x: u64, _: u64| {
        let map = TensorMap::new(TensorElement::U8, x, &[16], &[], &[16]);
        (map.clone(), map)
    };
    for config in [
        Config::default(),
        Config { async_mode: flashcore_sim::AsyncMode::Early, seed: 1, ..Config::default() },
    ] {
        let outcome = run_maps(&module, 1, &x, 512 * registers, 0, &maps, config.clone());
        assert_clean(&outcome, &config);
        let words = outcome.u32s();
        for i in 0..64 {
            for j in 0..n {
                let (warp, g, half) = (i / 16, i % 8, i % 16 / 8);
                let thread = 32 * warp + 4 * g + j % 8 / 2;
                let got = if p.half_accumulator {
                    let word = words[128 * (2 * (j / 8) + half) + thread];
                    half::f16::from_bits((word >> (16 * (j % 2))) as u16).to_f32()
                } else {
                    f32::from_bits(words[128 * (4 * (j / 8) + 2 * half + j % 2) + thread])
                };
                let sign = if p.negate_b { -1.0 } else { 1.0 };
                let want: f32 = sign * (0..depth).map(|k| value_a(i, k) * value_b(j, k)).sum::<f32>();
                assert_eq!(
                    got, want,
                    "row {i} column {j} of {:?} {:?} A {:?} B {:?}",
                    p.a, p.b, p.a_layout, p.b_layout
                );
            }
        }
    }
}

const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

fn product(n: u16, ty: MatrixTy, a: Option<(bool, Swizzle)>, b: (bool, Swizzle)) -> Product {
    Product { n, a: ty, b: ty, a_layout: a, b_layout: b, half_accumulator: false, negate_b: false }
}

#[test]
fn wgmma_reads_k_major_and_mn_major_operands_in_every_swizzle() {
    for a_swizzle in SWIZZLES {
        for b_swizzle in SWIZZLES {
            for (a_mn, b_mn) in [(false, false), (false, true), (true, false), (true, true)] {
                check_product(&product(64, MatrixTy::F16, Some((a_mn, a_swizzle)), (b_mn, b_swizzle)));
            }
        }
    }
}

#[test]
fn wgmma_takes_a_from_registers_and_has_every_width() {
    for n in [8, 16, 24, 64, 96, 128, 256] {
        check_product(&product(n, MatrixTy::Bf16, None, (false, Swizzle::B128)));
    }
    check_product(&product(128, MatrixTy::F16, None, (true, Swizzle::B128)));
}

#[test]
fn wgmma_multiplies_fp8_and_accumulates_in_halves_or_negated() {
    let p =
        |a, b, a_layout| Product { a, b, ..product(64, MatrixTy::E4m3, a_layout, (false, Swizzle::B128)) };
    check_product(&p(MatrixTy::E4m3, MatrixTy::E4m3, Some((false, Swizzle::B128))));
    check_product(&p(MatrixTy::E5m2, MatrixTy::E4m3, Some((false, Swizzle::B64))));
    check_product(&p(MatrixTy::E4m3, MatrixTy::E5m2, None));
    let fp8 = p(MatrixTy::E5m2, MatrixTy::E4m3, Some((false, Swizzle::B128)));
    check_product(&Product { half_accumulator: true, ..fp8 });
    let halves = product(32, MatrixTy::F16, Some((false, Swizzle::B32)), (false, Swizzle::B32));
    check_product(&Product { half_accumulator: true, ..halves });
    let negated = product(32, MatrixTy::F16, Some((false, Swizzle::B128)), (true, Swizzle::B64));
    check_product(&Product { negate_b: true, ..negated });
}

#[test]
fn a_tensor_map_of_another_rank_or_no_map_at_all_is_a_finding() {
    let module = box_kernel(2, &[0, 0], 1024, 1024);
    let x = vec![0u8; 4096];
    let config = Config { budget: 1_000_000, ..Config::default() };
    let flat = |x: u64, _: u64| {
        let map = TensorMap::new(TensorElement::U8, x, &[1024], &[], &[128]);
        (map.clone(), map)
    };
    let outcome = run_maps(&module, 1, &x, 1024, 0, &flat, config.clone());
    let finding = assert_found(&outcome, &config, FindingKind::BadDescriptor);
    assert_eq!(finding.message, "2 coordinates for a tensor of 1 dimensions");
    let mut sim = flashcore_sim::Sim::new(config);
    let params = Maps {
        x_map: flashcore_ptx::TensorMap([7; 128]),
        y_map: flashcore_ptx::TensorMap::default(),
        x: GlobalPtr(0),
        y: GlobalPtr(0),
        n: 0,
    };
    let report = sim
        .launch(&module, "test", flashcore_sim::LaunchDims::linear(1, 32), &params.pack())
        .expect("possible");
    assert!(report.of(FindingKind::BadDescriptor).any(|f| f.message.contains("no tensor map")));
}
