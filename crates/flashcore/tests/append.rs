//! A step of decoding: new keys and values are where they belong, turned by their positions, nothing else has changed, and
//! attention has seen them.

use flashcore::{
    Append, Attention, DType, Descales, Device, Error, F8E4M3, Layout, Mask, Name, Pages, Problem, Result,
    Rotary, Starts, Storage, Tensor, TensorBuf, TensorMut, oracle,
};

/// How the caches lie.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cache {
    /// A batch entry per sequence.
    Dense,
    /// Entries that sequences choose, from a row on that is not their first.
    Chosen,
    /// In pages of so many keys.
    Paged(usize),
}

/// The descales of a cache of f8.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Codes {
    /// All are 1, and none is given.
    Plain,
    /// One for each sequence and head.
    PerHead,
    /// One for each so many keys of those.
    PerBlock(usize),
}

impl Codes {
    /// That of keys or of values.
    fn descale(self, of_values: bool, [sequence, head, key]: [usize; 3]) -> f32 {
        let block = match self {
            Codes::Plain => return 1.0,
            Codes::PerHead => 0,
            Codes::PerBlock(keys) => key / keys,
        };
        [3.0, 0.13, 0.004, 0.25, 1.7][(sequence + 2 * head + 3 * block + usize::from(of_values)) % 5]
    }
}

/// A step: what lies where, and what is asked.
#[derive(Clone, Debug)]
struct Step {
    dtype: DType,
    /// Of a cache of f8.
    codes: Option<Codes>,
    heads: [usize; 2],
    dims: [usize; 2],
    /// Keys of each sequence, new keys, and queries.
    before: Vec<u32>,
    new: Vec<u32>,
    queries: Vec<u32>,
    room: usize,
    cache: Cache,
    /// Whether queries are packed, and whether new keys are. Else all sequences have as many as the first.
    packed: [bool; 2],
    /// Elements that are turned, and whether pairs are neighbours.
    rotary: Option<(usize, bool)>,
    positions: Option<Vec<u32>>,
    mask: Mask,
}

impl Step {
    fn new(before: &[u32]) -> Self {
        Self {
            dtype: DType::F16,
            codes: None,
            heads: [4, 2],
            dims: [32, 16],
            before: before.into(),
            new: vec![1; before.len()],
            queries: vec![1; before.len()],
            room: 80,
            cache: Cache::Dense,
            packed: [false; 2],
            rotary: Some((32, false)),
            positions: None,
            mask: Mask::Causal,
        }
    }

    fn sequences(&self) -> usize {
        self.before.len()
    }

    fn cache_dtype(&self) -> DType {
        if self.codes.is_some() { DType::F8E4M3 } else { self.dtype }
    }

    fn after(&self, sequence: usize) -> usize {
        (self.before[sequence] + self.new[sequence]) as usize
    }
}

/// Numbers that look random, as a type has them.
fn drawn(seed: usize, len: usize, dtype: DType) -> Vec<f32> {
    let all = (0..len).map(|i| (((i * 7919 + seed * 104_729) % 65_537) as f32 * 0.37).sin() * 1.4);
    TensorBuf::from_f32(&all.collect::<Vec<f32>>(), [1, 1, 1, len], dtype).unwrap().to_f32()
}

/// Rows by sequence, head and row, each with so many elements.
#[derive(Clone, Debug)]
struct Rows {
    rows: Vec<Vec<Vec<Vec<f32>>>>,
}

impl Rows {
    fn draw(seed: usize, lens: &[usize], heads: usize, width: usize, dtype: DType) -> Self {
        let of = |sequence: usize, head: usize, row: usize| {
            drawn(seed + 1000 * sequence + 100 * head + 7 * row, width, dtype)
        };
        let rows = lens.iter().enumerate().map(|(sequence, &len)| {
            (0..heads).map(|head| (0..len).map(|row| of(sequence, head, row)).collect()).collect()
        });
        Self { rows: rows.collect() }
    }

    /// Puts the rows of sequences where they belong in a tensor of this shape that is otherwise NaN.
    fn placed(
        &self,
        shape: [usize; 4],
        layout: Layout,
        dtype: DType,
        place: impl Fn(usize, usize) -> [usize; 2],
    ) -> TensorBuf {
        let mut tensor = TensorBuf::zeros(dtype, layout).unwrap();
        let mut to = tensor.view_mut();
        let [entries, heads, len, width] = shape;
        for (entry, head, row) in each([entries, heads, len]) {
            to.write_row(entry, head, row, &vec![f32::NAN; width]);
        }
        for (sequence, of) in self.rows.iter().enumerate() {
            for (head, of) in of.iter().enumerate() {
                for (row, elements) in of.iter().enumerate() {
                    let [entry, at] = place(sequence, row);
                    to.write_row(entry, head, at, elements);
                }
            }
        }
        tensor
    }

    /// One sequence as a dense tensor, whose rows are multiplied.
    fn alone(
        &self,
        sequence: usize,
        width: usize,
        dtype: DType,
        by: impl Fn(usize, usize) -> f32,
    ) -> TensorBuf {
        let of = &self.rows[sequence];
        let mut values = Vec::new();
        for (head, rows) in of.iter().enumerate() {
            for (row, elements) in rows.iter().enumerate() {
                values.extend(elements.iter().map(|x| x * by(head, row)));
            }
        }
        TensorBuf::from_f32(&values, [1, of.len(), of[0].len(), width], dtype).unwrap()
    }
}

fn each([a, b, c]: [usize; 3]) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..a * b * c).map(move |i| (i / (b * c), i / c % b, i % c))
}

fn starts(lens: &[u32]) -> Vec<u32> {
    (0..=lens.len()).map(|n| lens[..n].iter().sum()).collect()
}

/// The tensors of a step.
struct Made {
    tables: [TensorBuf; 2],
    positions: Vec<i32>,
    k_starts: Vec<u32>,
    pages: Vec<i32>,
    /// Of keys and of values.
    descales: [TensorBuf; 2],
    q: TensorBuf,
    new: [TensorBuf; 2],
    caches: [TensorBuf; 2],
    /// What the caches are to hold.
    expected: [TensorBuf; 2],
    /// The queries as attention is to see them, and the keys and values.
    seen: [Rows; 3],
}

const TABLE: usize = 200;

impl Made {
    fn of(step: &Step) -> Self {
        let Step { dtype, heads: [heads_q, heads_kv], dims: [dim, dim_v], room, .. } = *step;
        let count = step.sequences();
        let lens = |of: &[u32]| of.iter().map(|&len| len as usize).collect::<Vec<_>>();
        let after: Vec<usize> = (0..count).map(|sequence| step.after(sequence)).collect();
        let q = Rows::draw(1, &lens(&step.queries), heads_q, dim, dtype);
        // Rows that are there already are of the cache's type.
        let [k, v] = [(2, dim), (3, dim_v)].map(|(seed, width)| {
            let mut all = Rows::draw(seed, &after, heads_kv, width, dtype);
            for (heads, &before) in all.rows.iter_mut().zip(&step.before) {
                for row in heads.iter_mut().flat_map(|rows| &mut rows[..before as usize]) {
                    *row = drawn(row.len() + seed, row.len(), step.cache_dtype());
                }
            }
            all
        });

        let half = step.rotary.map_or(8, |(turned, _)| turned / 2);
        let angles = (0..TABLE * half).map(|i| (i / half) as f32 * 0.3_f32.powi((i % half) as i32));
        let tables = [f32::cos, f32::sin].map(|of| {
            let all: Vec<f32> = angles.clone().map(of).collect();
            TensorBuf::from_f32(&all, [1, 1, TABLE, half], dtype).unwrap()
        });
        let [cos, sin] = tables.each_ref().map(TensorBuf::to_f32);
        let turn = |elements: &mut [f32], position: usize| {
            let Some((turned, interleaved)) = step.rotary else { return };
            let before = elements.to_vec();
            for i in 0..turned / 2 {
                let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, turned / 2 + i) };
                let [cos, sin] = [&cos, &sin].map(|table| f64::from(table[position * half + i]));
                let (x, y) = (f64::from(before[a]), f64::from(before[b]));
                (elements[a], elements[b]) = ((x * cos - y * sin) as f32, (x * sin + y * cos) as f32);
            }
        };
        let rounded = |elements: &[f32]| {
            TensorBuf::from_f32(elements, [1, 1, 1, elements.len()], dtype).unwrap().to_f32()
        };
        // What is stored of a new row of keys or values.
        let stored = |elements: &[f32], of_values: bool, place: [usize; 3]| {
            let Some(codes) = step.codes else { return rounded(elements) };
            let descale = codes.descale(of_values, place);
            elements.iter().map(|x| F8E4M3::from_f32(x / descale).to_f32()).collect()
        };
        let masked = step.mask != Mask::None;
        let mut seen = [q.clone(), k.clone(), v.clone()];
        let positions: Vec<u32> = step.positions.clone().unwrap_or(step.before.clone());
        for (sequence, &first) in positions.iter().enumerate() {
            let first = first as usize;
            for of in &mut seen[0].rows[sequence] {
                for (row, elements) in of.iter_mut().enumerate() {
                    turn(elements, first + if masked { row } else { 0 });
                    *elements = rounded(elements);
                }
            }
            let before = step.before[sequence] as usize;
            for (head, key) in (0..heads_kv).flat_map(|h| (before..after[sequence]).map(move |key| (h, key)))
            {
                let [of_k, of_v] = [1, 2];
                let elements = &mut seen[of_k].rows[sequence][head][key];
                turn(elements, first + key - before);
                *elements = stored(elements, false, [sequence, head, key]);
                let elements = &mut seen[of_v].rows[sequence][head][key];
                *elements = stored(elements, true, [sequence, head, key]);
            }
        }

        let (q_starts, new_starts) = (starts(&step.queries), starts(&step.new));
        let of_q = |sequence: usize, row: usize| {
            if step.packed[0] { [0, q_starts[sequence] as usize + row] } else { [sequence, row] }
        };
        let of_new = |sequence: usize, row: usize| {
            if step.packed[1] { [0, new_starts[sequence] as usize + row] } else { [sequence, row] }
        };
        // Some rows more than there are of sequences.
        let shape_q = if step.packed[0] {
            [1, heads_q, q_starts[count] as usize + 3, dim]
        } else {
            [count, heads_q, step.queries[0] as usize, dim]
        };
        let shape_new = |width| {
            if step.packed[1] {
                [1, heads_kv, new_starts[count] as usize + 3, width]
            } else {
                [count, heads_kv, step.new[0] as usize, width]
            }
        };
        let bshd = |shape| (shape, Layout::bshd(shape));
        let placed_q = {
            let (shape, layout) = bshd(shape_q);
            q.placed(shape, layout, dtype, of_q)
        };
        let news = [(&k, dim), (&v, dim_v)].map(|(of, width)| {
            let (shape, layout) = bshd(shape_new(width));
            let only = Rows {
                rows: (0..count)
                    .map(|b| of.rows[b].iter().map(|rows| rows[step.before[b] as usize..].to_vec()).collect())
                    .collect(),
            };
            only.placed(shape, layout, dtype, of_new)
        });

        // Entries in another order than sequences, with one that nobody has, and rows that count for nothing.
        let chosen = |sequence: usize| (2 * sequence + 1) % (count + 1 + count % 2);
        let k_starts: Vec<u32> =
            (0..=count).map(|b| if b < count { (chosen(b) * (room + 9) + b) as u32 } else { 7 }).collect();
        let page = if let Cache::Paged(page) = step.cache { page } else { 1 };
        let most = room.div_ceil(page);
        let mut pages = vec![-1; count * most];
        let mut next = 0;
        for (sequence, &after) in after.iter().enumerate() {
            for place in 0..after.div_ceil(page) {
                pages[sequence * most + place] = next * 5 % 97;
                next += 1;
            }
        }
        let of_k = |sequence: usize, row: usize| match step.cache {
            Cache::Dense => [sequence, row],
            Cache::Chosen => [0, k_starts[sequence] as usize + row],
            Cache::Paged(page) => [pages[sequence * most + row / page] as usize, row % page],
        };
        let shape_k = |width| match step.cache {
            Cache::Dense => [count, heads_kv, room, width],
            Cache::Chosen => [1, heads_kv, (count + 2) * (room + 9), width],
            Cache::Paged(page) => [97, heads_kv, page, width],
        };
        let cache = |of: &Rows, width| {
            let (shape, layout) = bshd(shape_k(width));
            of.placed(shape, layout, step.cache_dtype(), of_k)
        };
        let blocks = if let Some(Codes::PerBlock(keys)) = step.codes { room.div_ceil(keys) } else { 1 };
        let descales = [false, true].map(|of_values| {
            let of = |(sequence, head, block)| {
                let keys = if let Some(Codes::PerBlock(keys)) = step.codes { keys } else { 1 };
                step.codes.map_or(1.0, |codes| codes.descale(of_values, [sequence, head, block * keys]))
            };
            let numbers: Vec<f32> = each([count, heads_kv, blocks]).map(of).collect();
            TensorBuf::from_f32(&numbers, [count, heads_kv, blocks, 1], DType::F32).unwrap()
        });
        let mut were = [k.clone(), v.clone()];
        for of in &mut were {
            for (heads, &before) in of.rows.iter_mut().zip(&step.before) {
                for rows in heads {
                    rows.truncate(before as usize);
                }
            }
        }
        let caches = [cache(&were[0], dim), cache(&were[1], dim_v)];
        let expected = [cache(&seen[1], dim), cache(&seen[2], dim_v)];
        let positions = positions.iter().map(|&x| x as i32).collect();
        Self { tables, positions, k_starts, pages, descales, q: placed_q, new: news, caches, expected, seen }
    }

    /// Runs a step on a device; the caches are what it leaves.
    fn run(&mut self, step: &Step, device: &Device) -> Result<flashcore::Output> {
        let count = step.sequences();
        let [cos, sin] = self.tables.each_ref().map(TensorBuf::view);
        let [new_k, new_v] = self.new.each_ref().map(TensorBuf::view);
        let (new_starts, q_starts) = (starts(&step.new), starts(&step.queries));
        let longest = |lens: &[u32]| lens.iter().copied().max().unwrap_or(0) as usize;
        let of_new = Tensor::indices(&new_starts, [1, count + 1])?;
        let of_q = Tensor::indices(&q_starts, [1, count + 1])?;
        let of_k = Tensor::indices(&self.k_starts, [1, count + 1])?;
        let positions = Tensor::indices(&self.positions, [1, count])?;
        let table = Tensor::indices(&self.pages, [count, self.pages.len() / count])?;
        let mut append = Append::new(&new_k, &new_v);
        if let Some((_, interleaved)) = step.rotary {
            let mut rotary = Rotary::new(&cos, &sin);
            if interleaved {
                rotary = rotary.interleaved();
            }
            if step.positions.is_some() {
                rotary = rotary.positions(&positions);
            }
            append = append.rotary(rotary);
        }
        if step.packed[1] {
            append = append.packed(Starts::of(&of_new, longest(&step.new)));
        }
        let mut attention = Attention::new().mask(step.mask).key_lengths(&step.before).with_lse();
        if step.packed[0] {
            attention = attention.packed_queries(Starts::of(&of_q, longest(&step.queries)));
        }
        match step.cache {
            Cache::Dense => {}
            Cache::Chosen => attention = attention.packed_keys(Starts::apart(&of_k, step.room)),
            Cache::Paged(_) => attention = attention.paged(Pages::new(&table).with_most_keys(step.room)),
        }
        let [of_k, of_v] = self.descales.each_ref().map(TensorBuf::view);
        let of_heads = Descales::new().k(&of_k).v(&of_v);
        match step.codes {
            None | Some(Codes::Plain) => {}
            Some(Codes::PerHead) => attention = attention.descales(of_heads),
            Some(Codes::PerBlock(keys)) => attention = attention.descales(of_heads.per_block(keys)),
        }
        let [k, v] = &mut self.caches;
        attention.append(device, &append, &self.q.view(), &mut k.view_mut(), &mut v.view_mut())
    }
}

/// Bits of all elements, those of every NaN alike.
fn bits(tensor: &TensorBuf) -> Vec<u32> {
    tensor.to_f32().into_iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect()
}

/// Runs a step and checks everything.
fn check(step: &Step, device: &Device) {
    let mut made = Made::of(step);
    let out = made.run(step, device).unwrap_or_else(|error| panic!("{step:?} on {device}: {error}"));
    for (name, (is, expected)) in ["k", "v"].iter().zip(made.caches.iter().zip(&made.expected)) {
        let (is, expected) = (bits(is), bits(expected));
        let wrong = is.iter().zip(&expected).filter(|(a, b)| a != b).count();
        let first = is.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!(wrong, 0, "{step:?} on {device}: {name}, the first at {first:?}");
    }
    let Step { dims: [dim, dim_v], dtype, .. } = *step;
    let first_of_q = starts(&step.queries);
    for (sequence, &queries) in step.queries.iter().enumerate() {
        let queries = queries as usize;
        if queries == 0 {
            continue;
        }
        let problem = Problem::new(1, step.heads[0], queries, dim, dtype)
            .with_kv(step.heads[1], step.after(sequence))
            .with_head_dim_v(dim_v)
            .with_mask(step.mask);
        let [q, k, v] = [(0, dim), (1, dim), (2, dim_v)].map(|(which, width)| {
            let codes = step.codes.filter(|_| which > 0);
            let dtype = if codes.is_some() { DType::F32 } else { dtype };
            made.seen[which].alone(sequence, width, dtype, |head, row| {
                codes.map_or(1.0, |codes| codes.descale(which == 2, [sequence, head, row]))
            })
        });
        let truth = oracle::attention(&problem, &q.view(), &k.view(), &v.view(), None);
        let tolerance = match dtype {
            DType::F32 => 2e-5,
            DType::F16 => 3e-3,
            _ => 2e-2,
        };
        let lse = out.lse.as_ref().unwrap();
        for (head, query) in (0..step.heads[0]).flat_map(|h| (0..queries).map(move |i| (h, i))) {
            let [entry, row] =
                if step.packed[0] { [0, first_of_q[sequence] as usize + query] } else { [sequence, query] };
            let mut is = vec![0.0; dim_v];
            out.o.view().read_row(entry, head, row, &mut is);
            let at = head * queries + query;
            for (i, x) in is.iter().enumerate() {
                let truth = truth.o[at * dim_v + i];
                let off = (f64::from(*x) - truth).abs();
                assert!(
                    off <= tolerance,
                    "{step:?} on {device}: o of {sequence}, {head}, {query}: {x} for {truth}"
                );
            }
            let mut is = [0.0];
            lse.view().read_row(entry, head, row, &mut is);
            let (is, truth) = (f64::from(is[0]), truth.lse[at]);
            assert!(is == truth || (is - truth).abs() < 1e-3, "{step:?} on {device}: lse {is} for {truth}");
        }
    }
}

/// Steps that meet everything that an append has, for tensors of a type.
fn steps(dtype: DType) -> Vec<Step> {
    let one = Step { dtype, ..Step::new(&[5, 63, 0]) };
    let several = Step {
        new: vec![3, 3, 3],
        queries: vec![2, 2, 2],
        rotary: Some((16, true)),
        mask: Mask::Window { left: Some(20), right: Some(0) },
        ..one.clone()
    };
    let ragged = Step { new: vec![4, 0, 17], queries: vec![4, 3, 17], packed: [true, true], ..one.clone() };
    vec![
        Step { rotary: None, ..one.clone() },
        Step { cache: Cache::Chosen, positions: Some(vec![100, 64, 3]), ..several.clone() },
        Step { cache: Cache::Paged(16), mask: Mask::None, ..several.clone() },
        Step { cache: Cache::Chosen, rotary: Some((32, true)), ..one.clone() },
        Step { cache: Cache::Paged(16), ..ragged.clone() },
        Step { cache: Cache::Chosen, rotary: None, mask: Mask::None, ..ragged.clone() },
        Step { packed: [false, true], queries: vec![2; 3], new: vec![1, 2, 0], ..ragged },
        Step { heads: [2, 2], dims: [48, 48], rotary: Some((16, false)), mask: Mask::None, ..several },
        one,
    ]
}

#[test]
fn the_cpu_appends_and_attends() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for step in steps(dtype) {
            check(&step, &Device::cpu());
        }
    }
    check(&Step { cache: Cache::Paged(5), ..Step::new(&[5, 63, 0]) }, &Device::cpu());
    check(&Step { dims: [40, 24], rotary: Some((16, false)), ..Step::new(&[5, 63, 0]) }, &Device::cpu());
}

/// The same steps with a cache of f8; descales of blocks go with dense ones.
fn steps_in_codes(dtype: DType) -> impl Iterator<Item = Step> {
    steps(dtype).into_iter().flat_map(|step| {
        let per_block = (step.cache == Cache::Dense).then_some(Codes::PerBlock(32));
        let codes = [Some(Codes::Plain), Some(Codes::PerHead), per_block];
        codes.into_iter().flatten().map(move |codes| Step { codes: Some(codes), ..step.clone() })
    })
}

#[test]
fn the_cpu_appends_codes_of_8_bits_and_attends() {
    for step in [DType::F16, DType::BF16].into_iter().flat_map(steps_in_codes) {
        check(&step, &Device::cpu());
    }
    let blocks = Step { codes: Some(Codes::PerBlock(7)), ..Step::new(&[5, 63, 0]) };
    check(&Step { dims: [40, 24], rotary: Some((16, false)), ..blocks }, &Device::cpu());
}

/// The codes of a tensor of f8.
fn codes(tensor: &TensorBuf) -> Vec<u8> {
    let Storage::F8E4M3(codes) = tensor.storage() else { panic!("a tensor of {}", tensor.dtype()) };
    codes.iter().map(F8E4M3::to_bits).collect()
}

/// One new value, which lies in the cache's first row then.
fn stored(values: [f32; 16], descale: f32, device: &Device) -> Vec<u8> {
    let of = |values: &[f32], dtype| TensorBuf::from_f32(values, [1, 1, 1, 16], dtype).unwrap();
    let (q, new_v) = (of(&[0.5; 16], DType::BF16), of(&values, DType::BF16));
    let mut caches = [(); 2].map(|()| of(&[0.0; 16], DType::F8E4M3));
    let descale = Tensor::descale(std::slice::from_ref(&descale), [1, 1]).unwrap();
    let attention = Attention::new().key_lengths(&[0]).descales(Descales::new().v(&descale));
    let [k, v] = &mut caches;
    let new = Append::new(&q.view(), &new_v.view());
    attention.append(device, &new, &q.view(), &mut k.view_mut(), &mut v.view_mut()).unwrap();
    codes(&caches[1])
}

/// Checks what becomes of numbers that E4M3 does not have.
fn check_ends(device: &Device) {
    let [inf, nan] = [f32::INFINITY, f32::NAN];
    // 464 is half way between 448 and the code of NaN, and 2^-10 between 0 and the smallest.
    let numbers = [448.0, 464.0, 480.0, 1e30, inf, -1e30, -inf, nan, -nan, 0.0, -0.0, 1e-30, -1e-30];
    let (tie, above) = (2.0_f32.powi(-10), 1.5 * 2.0_f32.powi(-10));
    let [a, b, c, d, e, f, g, h, i, j, k, l, m] = numbers;
    let values = [a, b, c, d, e, f, g, h, i, j, k, l, m, tie, above, -above];
    let expected =
        [0x7e, 0x7e, 0x7e, 0x7e, 0x7e, 0xfe, 0xfe, 0x7f, 0x7f, 0, 0x80, 0, 0x80, 0, 1, 0x81].to_vec();
    for descale in [1.0, 0.25] {
        assert_eq!(stored(values.map(|x| x * descale), descale, device), expected, "{device}, {descale}");
    }
}

#[test]
fn what_is_too_large_becomes_the_largest_code_and_every_nan_the_positive_one() {
    check_ends(&Device::cpu());
}

#[test]
fn a_descale_that_is_no_number_above_0_is_refused_before_anything_is_written() {
    let step = Step { codes: Some(Codes::PerHead), ..Step::new(&[4, 5]) };
    for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let mut made = Made::of(&step);
        made.descales[1].view_mut().write_row(1, 0, 0, &[wrong]);
        let before = made.caches.clone();
        let error = made.run(&step, &Device::cpu()).unwrap_err();
        let is = |given: f32| given.to_bits() == wrong.to_bits();
        assert!(
            matches!(error, Error::Descale { tensor: Name::VDescale, entry: 1, head: 0, given } if is(given)),
            "{error}"
        );
        assert!(before.iter().zip(&made.caches).all(|(was, is)| bits(was) == bits(is)));
    }
}

#[test]
fn new_keys_of_8_bits_are_refused() {
    let of = |dtype| TensorBuf::zeros(dtype, Layout::bhsd([1, 1, 1, 16])).unwrap();
    let (q, codes) = (of(DType::BF16), of(DType::F8E4M3));
    let attention = Attention::new().key_lengths(&[0]);
    let step = |q: &TensorBuf, new: &TensorBuf| {
        let [mut k, mut v] = [(); 2].map(|()| of(DType::F8E4M3));
        let new = Append::new(&new.view(), &new.view());
        attention.append(&Device::cpu(), &new, &q.view(), &mut k.view_mut(), &mut v.view_mut()).unwrap_err()
    };
    let error = step(&q, &codes);
    assert!(matches!(error, Error::DTypeMismatch { tensor: Name::NewK, .. }), "{error}");
    let error = step(&codes, &codes);
    assert!(matches!(error, Error::Append { .. }), "{error}");
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let fits = Step { room: 6, new: vec![2, 2], ..Step::new(&[4, 4]) };
    let mut made = Made::of(&fits);
    let before = made.caches.clone();
    let full = Step { before: vec![4, 5], ..fits };
    let error = made.run(&full, &Device::cpu()).unwrap_err();
    assert_eq!(error, Error::Room { sequence: 1, length: 5, new: 2, room: 6 });
    assert!(before.iter().zip(&made.caches).all(|(was, is)| bits(was) == bits(is)));

    let far = Step { positions: Some(vec![3, 199]), ..Step::new(&[4, 5]) };
    let mut made = Made::of(&far);
    assert!(made.run(&far, &Device::cpu()).is_ok());
    made.positions[1] = 200;
    let error = made.run(&far, &Device::cpu()).unwrap_err();
    assert_eq!(error, Error::Position { sequence: 1, position: 200, table: TABLE });
}

#[test]
fn tables_of_another_width_or_type_are_refused() {
    let step = Step::new(&[4, 5]);
    for half in [0, 12, 24] {
        let mut made = Made::of(&step);
        let narrow = || TensorBuf::zeros(DType::F16, Layout::bhsd([1, 1, TABLE, half])).unwrap();
        made.tables = [narrow(), narrow()];
        let error = made.run(&step, &Device::cpu()).unwrap_err();
        assert!(matches!(error, Error::Append { .. }), "{error}");
    }
    let mut made = Made::of(&step);
    made.tables[1] = TensorBuf::zeros(DType::F32, Layout::bhsd([1, 1, TABLE, 16])).unwrap();
    let error = made.run(&step, &Device::cpu()).unwrap_err();
    assert!(matches!(error, Error::DTypeMismatch { tensor: Name::Sin, .. }), "{error}");
}

#[test]
fn an_append_needs_key_lengths_and_tensors_of_its_own() {
    let (mut keys, mut values) = (vec![0.5_f32; 8 * 16], vec![0.5_f32; 8 * 16]);
    let one = vec![0.5_f32; 16];
    let q = Tensor::new(&one, &[1, 1, 1, 16]).unwrap();
    let mut k = TensorMut::new(&mut keys, &[1, 1, 8, 16]).unwrap();
    let mut v = TensorMut::new(&mut values, &[1, 1, 8, 16]).unwrap();
    let new = Append::new(&q, &q);
    let attention = Attention::new().key_lengths(&[3]);
    assert!(attention.append(&Device::cpu(), &new, &q, &mut k, &mut v).is_ok());
    let without = Attention::new().append(&Device::cpu(), &new, &q, &mut k, &mut v);
    assert!(matches!(without, Err(Error::Append { .. })));
    let two = vec![0.5_f32; 2 * 16];
    let two = Tensor::new(&two, &[1, 1, 2, 16]).unwrap();
    let uneven = attention.append(&Device::cpu(), &Append::new(&q, &two), &q, &mut k, &mut v);
    assert!(matches!(uneven, Err(Error::SizeMismatch { tensor: Name::NewV, .. })));
}

#[cfg(feature = "sim")]
mod simulated {
    use flashcore::{
        plan::{Hardware, Kernel, Plan, Target},
        sim::SimGpu,
    };

    use super::*;

    fn device(target: Target) -> Device {
        Device::sim(SimGpu::new(target).with_sms(12))
    }

    #[test]
    fn hopper_appends_and_attends() {
        for dtype in [DType::F16, DType::BF16] {
            for step in steps(dtype) {
                check(&step, &device(Target::Sm90a));
            }
        }
    }

    #[test]
    fn ampere_appends_and_attends() {
        for step in steps(DType::BF16) {
            check(&step, &device(Target::Sm80));
        }
    }

    /// Those of the targets that have E4M3.
    const EIGHT: [Target; 2] = [Target::Sm89, Target::Sm90a];

    #[test]
    fn hopper_and_ada_append_codes_of_8_bits_and_attend() {
        let mut checked = 0;
        for step in [DType::F16, DType::BF16].into_iter().flat_map(steps_in_codes) {
            for device in EIGHT.map(device) {
                // What attends to such a cache may not take how it lies, or how queries do.
                if !matches!(Made::of(&step).run(&step, &device), Err(Error::Unsupported { .. })) {
                    check(&step, &device);
                    checked += 1;
                }
            }
        }
        assert!(checked >= 40, "{checked}");
    }

    #[test]
    fn their_codes_are_those_of_the_cpu_also_where_e4m3_ends() {
        for target in EIGHT {
            check_ends(&device(target));
        }
    }

    #[test]
    fn ampere_refuses_a_cache_of_8_bits() {
        let problem = "2x8/2x1/256x64 bf16 kv=f8 causal key-lengths append=1".parse().unwrap();
        let refused = Plan::choose(&problem, &Hardware::typical(Target::Sm80)).unwrap_err();
        assert!(refused.to_string().contains("sm_89 or later"), "{refused}");
    }

    #[test]
    fn pages_of_any_size_and_heads_of_any_multiple_of_8_are_appended_to() {
        for target in [Target::Sm80, Target::Sm90a] {
            let odd = Step { cache: Cache::Paged(5), ..Step::new(&[5, 63, 0]) };
            check(&odd, &device(target));
            check(&Step { dims: [40, 24], rotary: Some((16, false)), ..odd.clone() }, &device(target));
            check(&Step { dims: [24, 8], rotary: None, cache: Cache::Dense, ..odd }, &device(target));
        }
    }

    #[test]
    fn an_append_is_the_first_launch_of_its_plan() {
        for (text, kernels) in [
            ("2x8/2x1/256x64 bf16 causal key-lengths append=1 rotary=64/512", 2),
            ("2x8/2x1/65536x64 bf16 causal key-lengths append=1", 3),
        ] {
            let plan = Plan::choose(&text.parse().unwrap(), &Hardware::typical(Target::Sm90a)).unwrap();
            assert_eq!((plan.launches.len(), plan.launches[0].kernel()), (kernels, Kernel::Append), "{plan}");
            assert_ne!(plan.kernel(), Kernel::Append);
        }
    }
}
