//! What only Hopper has: tensor maps, clusters, programmatic dependent launch.

use crate::kernels::{HOPPER, Kernels};
use crate::report::{Report, Result, Seen, ensure};
use flashcore_driver::*;

const COLUMNS: usize = 192;
const ROWS: usize = 200;
const BOX: usize = 64;

pub fn check(report: &mut Report, context: &Context, kernels: &Kernels) {
    if context.properties().compute_capability != (ComputeCapability { major: 9, minor: 0 }) {
        report.check("PTX for sm_90a is refused in words on another GPU", || {
            match Module::from_ptx(context, "hopper.ptx", HOPPER, &JitOptions::default()) {
                Err(error) => Ok(Seen::Pass(error.to_string())),
                Ok(_) => Err("it was loaded".into()),
            }
        });
        return;
    }
    let loaded = report.obtain("the sm_90a kernels load", || {
        Ok(Module::from_ptx(context, "hopper.ptx", HOPPER, &JitOptions::default())?)
    });
    let Some(module) = loaded else { return };
    report.check("TMA brings boxes, swizzled and not, with zeros outside", || load_tiles(context, &module));
    report.check("the driver accepts every kind of map that is validated", || accepted_maps(context));
    report.check("the same tile comes through a linked cubin", || {
        let cubin = link_ptx(context, "hopper.ptx", HOPPER, &JitOptions::default())?;
        load_tiles(context, &Module::from_cubin(context, "hopper.cubin", &cubin.bytes)?)
    });
    report.check("blocks of a cluster read each other's shared memory", || clusters(context, &module));
    report
        .check("a programmatic launch overlaps with the kernel before it, and still sees its result", || {
            overlap(context, &module)
        });
    report.check("after all that the context works", || {
        kernels.prove(&context.stream(StreamOptions::default())?)?;
        Ok(Seen::Pass(String::new()))
    });
}

/// The matrix that the maps below describe: element (row, column) is row * 192 + column.
fn matrix() -> Vec<u16> {
    (0..ROWS * COLUMNS).map(|i| i as u16).collect()
}

fn spec(address: u64, swizzle: Swizzle) -> TensorMapSpec<'static> {
    TensorMapSpec {
        element: TensorMapElement::F16,
        address,
        dims: &[COLUMNS as u64, ROWS as u64],
        strides: &[2 * COLUMNS as u64],
        box_dims: &[BOX as u32, BOX as u32],
        swizzle,
        l2_promotion: L2Promotion::Bytes256,
        out_of_bounds: OutOfBounds::Zeros,
    }
}

fn load_tiles(context: &Context, module: &Module) -> Result<Seen> {
    let stream = context.stream(StreamOptions::default())?;
    let kernel = module.function("load_tile")?;
    let host = matrix();
    let source = stream.upload_new(&host)?;
    let mut tiles = 0;
    for swizzle in [Swizzle::None, Swizzle::Bytes128] {
        let spec = spec(source.address(), swizzle);
        ensure!(spec.box_bytes() == 8192, "the box has {} bytes", spec.box_bytes());
        let map = spec.encode(context)?;
        for (column, row) in [(0, 0), (64, 128), (128, 160), (160, 32)] {
            let out = stream.upload_new(&[0xffffu16; BOX * BOX])?;
            let mut params = ParamBuffer::new();
            let config = LaunchConfig::new([1; 3], [128, 1, 1]);
            params.push_u32(column)?.push_tensor_map(&map)?.push_u32(row)?.push_u64(out.address())?;
            // SAFETY: the kernel reads through the map and writes 8192 bytes of `out`.
            unsafe { kernel.launch_fields(&stream, &config, params.as_bytes(), &[0, 64, 192, 200]) }?;
            let got = stream.download_all::<u16>(&out)?;
            for r in 0..BOX {
                for c in 0..BOX {
                    let (y, x) = (row as usize + r, column as usize + c);
                    let want = if y < ROWS && x < COLUMNS { host[y * COLUMNS + x] } else { 0 };
                    // A row is 128 bytes: eight chunks of eight elements, permuted by the row's number.
                    let chunk = if swizzle == Swizzle::None { c / 8 } else { (c / 8) ^ (r % 8) };
                    let have = got[r * BOX + chunk * 8 + c % 8];
                    ensure!(
                        have == want,
                        "{swizzle:?} tile ({column}, {row}), element ({r}, {c}): {have}, not {want}"
                    );
                }
            }
            tiles += 1;
        }
    }
    Ok(Seen::Pass(format!("{tiles} tiles; parameters: {:?} bytes", kernel.param_bytes())))
}

fn accepted_maps(context: &Context) -> Result<Seen> {
    let buffer = context.alloc(1 << 20)?;
    let base = spec(buffer.address(), Swizzle::None);
    let mut accepted = 0;
    let mut accept = |name: &str, spec: TensorMapSpec<'_>| -> Result<()> {
        spec.encode(context).map_err(|error| format!("{name}: {error}\n{spec:?}"))?;
        accepted += 1;
        Ok(())
    };
    use TensorMapElement::*;
    for element in [U8, U16, U32, I32, U64, I64, F16, F32, F64, Bf16] {
        let inner = (32 / element.bytes()) as u32;
        for swizzle in [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128] {
            accept(
                "elements and swizzles",
                TensorMapSpec { element, swizzle, dims: &[32, 200], box_dims: &[inner, 8], ..base },
            )?;
        }
    }
    for l2_promotion in
        [L2Promotion::None, L2Promotion::Bytes64, L2Promotion::Bytes128, L2Promotion::Bytes256]
    {
        accept("L2 promotions", TensorMapSpec { l2_promotion, ..base })?;
    }
    accept("NaN outside", TensorMapSpec { out_of_bounds: OutOfBounds::Nan, ..base })?;
    accept("rank 1", TensorMapSpec { dims: &[1 << 12], strides: &[], box_dims: &[256], ..base })?;
    accept("the largest box", TensorMapSpec { box_dims: &[256, 256], ..base })?;
    accept("the largest dimension", TensorMapSpec { dims: &[64, 1 << 32], strides: &[128], ..base })?;
    accept("the largest stride", TensorMapSpec { dims: &[64, 2], strides: &[(1 << 40) - 16], ..base })?;
    accept("a tensor smaller than the box", TensorMapSpec { dims: &[8, 1], strides: &[16], ..base })?;
    // Heads of 128 as two panels of 64: the third stride is smaller than the second.
    accept(
        "panels in rank 5",
        TensorMapSpec {
            dims: &[64, 512, 2, 8, 2],
            strides: &[2048, 128, 256, 1 << 20],
            box_dims: &[64, 128, 2, 1, 1],
            swizzle: Swizzle::Bytes128,
            ..base
        },
    )?;
    let broadcast = TensorMapSpec { strides: &[0], ..base }.encode(context);
    let stride_0 = broadcast.map_or_else(|error| error.to_string(), |_| "accepted".to_owned());
    Ok(Seen::Pass(format!("{accepted} maps; a stride of 0 is {stride_0}")))
}

fn clusters(context: &Context, module: &Module) -> Result<Seen> {
    let stream = context.stream(StreamOptions::default())?;
    let kernel = module.function("cluster_exchange")?;
    let mut seen = Vec::new();
    let run = |size: u32| -> Result<()> {
        let blocks = 2 * size;
        let out = stream.upload_new(&vec![0u32; blocks as usize])?;
        let mut params = ParamBuffer::new();
        params.push_u64(out.address())?;
        let config =
            LaunchConfig { cluster: Some([size, 1, 1]), ..LaunchConfig::new([blocks, 1, 1], [32, 1, 1]) };
        // SAFETY: the kernel writes one word of `out` for each block.
        unsafe { kernel.launch(&stream, &config, params.as_bytes()) }?;
        let got = stream.download_all::<u32>(&out)?;
        for block in 0..blocks {
            let neighbour = block / size * size + (block % size + 1) % size;
            let want = (100 + neighbour) * 1000 + size;
            let have = got[block as usize];
            ensure!(have == want, "cluster of {size}, block {block}: {have}, not {want}");
        }
        Ok(())
    };
    for size in [1, 2, 4, 8] {
        run(size)?;
        let config =
            LaunchConfig { cluster: Some([size, 1, 1]), ..LaunchConfig::new([size, 1, 1], [32, 1, 1]) };
        seen.push(format!("clusters of {size}: {} at once", kernel.max_active_clusters(&config)?));
    }
    let plain = LaunchConfig::new([64, 1, 1], [32, 1, 1]);
    let portable = kernel.max_cluster_size(&plain)?;
    match run(16) {
        Err(error) => seen.push(format!("16 before it is allowed: {error}")),
        Ok(()) => return Err("a cluster of 16 ran before it was allowed".into()),
    }
    kernel.allow_non_portable_clusters()?;
    let largest = kernel.max_cluster_size(&plain)?;
    if largest >= 16 {
        run(16)?;
    }
    ensure!(portable == 8 && largest >= 8, "largest clusters {portable} and {largest}");
    seen.push(format!("largest portable {portable}, largest allowed {largest}"));
    Ok(Seen::Pass(seen.join("\n")))
}

fn overlap(context: &Context, module: &Module) -> Result<Seen> {
    let stream = context.stream(StreamOptions::default())?;
    let (first, second) = (module.function("predecessor")?, module.function("successor")?);
    let one = LaunchConfig::new([1; 3], [1; 3]);
    let mut seen = Vec::new();
    for programmatic in [false, true] {
        let words = stream.upload_new(&[0u64; 4])?;
        let at = |index: u64| words.address() + 8 * index;
        let mut params = ParamBuffer::new();
        params.push_u64(at(0))?.push_u64(at(1))?.push_u64(300_000)?;
        // SAFETY: each kernel writes its own words of `words`.
        unsafe { first.launch(&stream, &one, params.as_bytes()) }?;
        let mut params = ParamBuffer::new();
        params.push_u64(at(0))?.push_u64(at(2))?.push_u64(at(3))?;
        // SAFETY: as above.
        unsafe { second.launch(&stream, &LaunchConfig { programmatic, ..one }, params.as_bytes()) }?;
        let got = stream.download_all::<u64>(&words)?;
        let (ended, started, value) = (got[1], got[2], got[3]);
        ensure!(value == 42, "the second kernel saw {value} instead of 42");
        let after = started.cast_signed() - ended.cast_signed();
        ensure!(
            (after < -100_000) == programmatic,
            "programmatic {programmatic}: the second kernel started {after} ns after the end of the first"
        );
        seen.push(format!("programmatic {programmatic}: started {after} ns after the first one's end"));
    }
    Ok(Seen::Pass(seen.join("\n")))
}
