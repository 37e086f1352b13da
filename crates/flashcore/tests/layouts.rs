//! Packed sequences and keys in pages: the same as each sequence alone, in place and without a word about the others.

use flashcore::cpu::{self, Engine};
use flashcore::{
    Attention, Backward, DType, Device, Error, Layout, Name, Pages, Problem, Starts, Tensor, TensorBuf,
    TensorMut,
};

/// Sequences of these lengths: none on either side, one token, uneven ones.
const QUERIES: [u32; 7] = [5, 0, 1, 130, 33, 0, 17];
const KEYS: [u32; 7] = [5, 40, 1, 130, 0, 0, 300];

/// Where sequences of these lengths begin.
fn starts(lengths: &[u32]) -> Vec<u32> {
    let add = |sum: &mut u32, len: u32| {
        *sum += len;
        Some(*sum)
    };
    std::iter::once(0).chain(lengths.iter().copied().scan(0, |sum, len| add(sum, len))).collect()
}

fn wave(seed: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| (((i * 7919 + seed * 104_729) % 65_537) as f32 * 0.37).sin() * 1.4).collect()
}

fn buffer(seed: usize, shape: [usize; 4]) -> TensorBuf {
    TensorBuf::from_f32(&wave(seed, shape.iter().product()), shape, DType::F32).unwrap()
}

/// Rows of a packed tensor as a dense one.
fn rows(tensor: &Tensor<'_>, start: u32, end: u32) -> TensorBuf {
    let [_, heads, _, dim] = tensor.shape();
    let len = (end - start) as usize;
    let mut values = vec![0.0; heads * len * dim];
    for (i, row) in values.chunks_exact_mut(dim).enumerate() {
        tensor.read_row(0, i / len, start as usize + i % len, row);
    }
    TensorBuf::from_f32(&values, [1, heads, len, dim], DType::F32).unwrap()
}

fn close(given: &[f32], expected: &[f32], what: &str) {
    assert_eq!(given.len(), expected.len(), "{what}");
    for (i, (a, b)) in given.iter().zip(expected).enumerate() {
        assert!(a == b || (a - b).abs() < 2e-5, "{what}, element {i}: {a} for {b}");
    }
}

fn devices() -> impl Iterator<Item = Device> {
    cpu::available().into_iter().map(|isa| Device::cpu_with(Engine::new().with_isa(isa).unwrap()))
}

fn options() -> [Attention<'static>; 4] {
    let plain = Attention::new().with_lse();
    [plain, plain.causal(), plain.window(20, 3).softcap(5.0), plain.causal_top_left()]
}

#[test]
fn packed_sequences_are_computed_as_each_alone_and_so_are_their_gradients() {
    let (of_q, of_k) = (starts(&QUERIES), starts(&KEYS));
    let (total_q, total_k) = (of_q[7] as usize, of_k[7] as usize);
    let (q, k, v) =
        (buffer(1, [1, 4, total_q, 24]), buffer(2, [1, 2, total_k, 24]), buffer(3, [1, 2, total_k, 8]));
    let d_o = buffer(4, [1, 4, total_q, 8]);
    for device in devices() {
        for attention in options() {
            let packed = attention
                .packed_queries(Starts::new(&of_q).unwrap())
                .packed_keys(Starts::new(&of_k).unwrap());
            let out = packed.run(&device, &q.view(), &k.view(), &v.view()).unwrap();
            let (o, lse) = (out.o, out.lse.unwrap());
            let given = Backward::new([&q.view(), &k.view(), &v.view()], &o.view(), &lse.view(), &d_o.view());
            let gradients = packed.backward(&device, &given).unwrap();
            for sequence in 0..7 {
                let (from, to) = (of_q[sequence], of_q[sequence + 1]);
                let (from_k, to_k) = (of_k[sequence], of_k[sequence + 1]);
                let part = |tensor: &TensorBuf| rows(&tensor.view(), from, to);
                let part_k = |tensor: &TensorBuf| rows(&tensor.view(), from_k, to_k);
                let [q, d_o] = [&q, &d_o].map(part);
                let [k, v] = [&k, &v].map(part_k);
                let alone = attention.run(&device, &q.view(), &k.view(), &v.view()).unwrap();
                let what = |name: &str| format!("{name} of sequence {sequence} on {device}, {attention:?}");
                close(&part(&o).to_f32(), &alone.o.to_f32(), &what("o"));
                let lse_alone = alone.lse.unwrap();
                close(&part(&lse).to_f32(), &lse_alone.to_f32(), &what("lse"));
                let inputs = [&q.view(), &k.view(), &v.view()];
                let given = Backward::new(inputs, &alone.o.view(), &lse_alone.view(), &d_o.view());
                let of_alone = attention.backward(&device, &given).unwrap();
                close(&part(&gradients.dq).to_f32(), &of_alone.dq.to_f32(), &what("dq"));
                close(&part_k(&gradients.dk).to_f32(), &of_alone.dk.to_f32(), &what("dk"));
                close(&part_k(&gradients.dv).to_f32(), &of_alone.dv.to_f32(), &what("dv"));
            }
        }
    }
}

/// A pool with the keys of sequences in pages, shuffled, NaN wherever there is none; and its table.
fn pool(sequences: &[TensorBuf], page: usize, tokens_inside: bool) -> (Vec<f32>, Layout, Vec<i32>, usize) {
    let [_, heads, _, dim] = sequences[0].shape();
    let most = sequences.iter().map(|of| of.shape()[2].div_ceil(page)).max().unwrap();
    let used: usize = sequences.iter().map(|of| of.shape()[2].div_ceil(page)).sum();
    let pages = used + 3;
    // Five has no factor in common with most numbers of pages.
    let order: Vec<usize> = (0..pages).map(|i| (i * 5 + 2) % pages).collect();
    let order = if pages.is_multiple_of(5) { (0..pages).rev().collect() } else { order };
    let shape = [pages, heads, page, dim];
    let layout = if tokens_inside { Layout::bhsd(shape) } else { Layout::bshd(shape) };
    let mut data = vec![f32::NAN; shape.iter().product()];
    let mut memory = TensorMut::strided(&mut data, layout).unwrap();
    let (mut table, mut next) = (vec![-1; sequences.len() * most], 0);
    for (sequence, of) in sequences.iter().enumerate() {
        let mut row = vec![0.0; dim];
        for token in 0..of.shape()[2] {
            if token % page == 0 {
                table[sequence * most + token / page] = order[next] as i32;
                next += 1;
            }
            for head in 0..heads {
                of.view().read_row(0, head, token, &mut row);
                memory.write_row(table[sequence * most + token / page] as usize, head, token % page, &row);
            }
        }
    }
    (data, layout, table, most)
}

#[test]
fn keys_in_pages_are_read_where_they_are_and_nothing_behind_the_last_one() {
    let lengths = [37_u32, 0, 1, 300, 64];
    for (page, tokens_inside) in [(16, true), (64, false), (7, true), (256, false)] {
        let all = |seed: usize, dim: usize| -> Vec<TensorBuf> {
            let of = |(i, &len): (usize, &u32)| buffer(seed + i, [1, 2, len as usize, dim]);
            lengths.iter().enumerate().map(of).collect()
        };
        // Of one vector and of several; of whole vectors and not.
        for (dim, dim_v) in [(16, 16), (24, 40), (64, 128)] {
            let (keys, values) = (all(1, dim), all(100, dim_v));
            let (k, k_layout, table, most) = pool(&keys, page, tokens_inside);
            let (v, v_layout, ..) = pool(&values, page, tokens_inside);
            let (k, v) = (Tensor::strided(&k, k_layout).unwrap(), Tensor::strided(&v, v_layout).unwrap());
            let table = Tensor::indices(&table, [lengths.len(), most]).unwrap();
            for (len_q, heads_q) in [(1, 2), (1, 8), (3, 4), (50, 4)] {
                let q = buffer(7, [lengths.len(), heads_q, len_q, dim]);
                let each_q: Vec<TensorBuf> = (0..lengths.len())
                    .map(|i| {
                        let one = heads_q * len_q * dim;
                        let values = &q.to_f32()[i * one..(i + 1) * one];
                        TensorBuf::from_f32(values, [1, heads_q, len_q, dim], DType::F32).unwrap()
                    })
                    .collect();
                for (device, attention) in devices().flat_map(|it| options().map(|of| (it.clone(), of))) {
                    let paged = attention.paged(Pages::new(&table)).key_lengths(&lengths);
                    let out = paged.run(&device, &q.view(), &k, &v).unwrap();
                    let (mut o, mut lse) = (Vec::new(), Vec::new());
                    for (i, q) in each_q.iter().enumerate() {
                        let (k, v) = (keys[i].view(), values[i].view());
                        let alone = attention.run(&device, &q.view(), &k, &v).unwrap();
                        o.extend(alone.o.to_f32());
                        lse.extend(alone.lse.unwrap().to_f32());
                    }
                    let what = format!("{len_q} queries, pages of {page}, {dim}/{dim_v}, {device}");
                    close(&out.o.to_f32(), &o, &what);
                    close(&out.lse.unwrap().to_f32(), &lse, &what);
                }
            }
        }
    }
}

#[test]
fn rows_of_no_sequence_are_not_written() {
    let (of, values) = ([2_u32, 3, 3, 6], wave(1, 8));
    let x = Tensor::new(&values, &[1, 1, 8, 1]).unwrap();
    for device in devices() {
        let mut o = [77.0_f32; 8];
        let attention = Attention::new().packed(Starts::new(&of).unwrap());
        let mut to = TensorMut::new(&mut o, &[1, 1, 8, 1]).unwrap();
        attention.run_into(&device, &x, &x, &x, &mut to, None).unwrap();
        assert_eq!((o[0], o[1], o[6], o[7]), (77.0, 77.0, 77.0, 77.0));
        assert!(o[2..6].iter().all(|&x| x != 77.0), "{o:?}");
    }
}

#[test]
fn one_sequence_of_all_tokens_is_dense_attention() {
    let x = buffer(3, [1, 2, 90, 16]);
    let x = x.view();
    let dense = Attention::new().causal().run(&Device::cpu(), &x, &x, &x).unwrap();
    let packed = Attention::new().causal().packed(Starts::new(&[0, 90]).unwrap());
    assert_eq!(packed.run(&Device::cpu(), &x, &x, &x).unwrap().o, dense.o);
}

/// What is said of a call with packed queries and keys.
fn packed(of_q: &[u32], of_k: &[u32]) -> Option<Error> {
    let x = buffer(1, [1, 1, 8, 2]);
    let attention =
        Attention::new().packed_queries(Starts::new(of_q).unwrap()).packed_keys(Starts::new(of_k).unwrap());
    attention.problem(&x.view(), &x.view(), &x.view()).err()
}

#[test]
fn starts_that_cannot_be_are_refused() {
    assert_eq!(packed(&[0, 3, 8], &[0, 8, 8]), None);
    let fall = Error::Starts { tensor: Name::QStarts, sequence: 1, start: 5, end: 4, total: 8 };
    assert_eq!(packed(&[0, 5, 4], &[0, 8, 8]), Some(fall));
    let beyond = Error::Starts { tensor: Name::KStarts, sequence: 1, start: 5, end: 9, total: 8 };
    assert_eq!(packed(&[0, 5, 5], &[0, 5, 9]), Some(beyond));
    assert_eq!(packed(&[], &[0]), Some(Error::NoStarts { tensor: Name::QStarts }));
    let count = packed(&[0, 5, 5], &[0, 5]);
    assert!(
        matches!(count, Some(Error::SizeMismatch { tensor: Name::KStarts, given: 2, expected: 3, .. })),
        "{count:?}"
    );
    // A bound that is too small would leave rows out.
    let x = buffer(1, [1, 1, 8, 2]);
    let all = [0_u32, 3, 8];
    let bounded = Starts::of(&Tensor::indices(&all, [1, 3]).unwrap(), 4);
    let long = Attention::new().packed(bounded).problem(&x.view(), &x.view(), &x.view()).unwrap_err();
    assert_eq!(long, Error::SequenceLength { tensor: Name::QStarts, sequence: 1, given: 5, longest: 4 });
    // Packed tensors have one batch entry.
    let two = buffer(1, [2, 1, 8, 2]);
    let both = Attention::new().packed(Starts::new(&all).unwrap());
    let error = both.problem(&two.view(), &two.view(), &two.view()).unwrap_err();
    assert!(matches!(error, Error::SizeMismatch { what: "batch", given: 2, expected: 1, .. }), "{error}");
    let lengths = [4, 5];
    let error = both.key_lengths(&lengths).problem(&x.view(), &x.view(), &x.view()).unwrap_err();
    assert_eq!(error, Error::KeyLength { entry: 0, given: 4, len_k: 3 });
    let floats = buffer(1, [1, 1, 1, 3]);
    let error = Attention::new().packed(Starts::of(&floats.view(), 8));
    let error = error.problem(&x.view(), &x.view(), &x.view()).unwrap_err();
    assert!(matches!(error, Error::DTypeMismatch { tensor: Name::QStarts, expected: DType::I32, .. }));
}

#[test]
fn tables_that_cannot_be_are_refused_but_what_no_key_reaches_is_not_looked_at() {
    let (q, pool) = (buffer(1, [2, 1, 1, 2]), buffer(2, [4, 1, 16, 2]));
    let said = |table: &[i32], width: usize, most: Option<usize>, lengths: Option<&'static [u32]>| {
        let table = Tensor::indices(table, [2, width]).unwrap();
        let pages = Pages::new(&table);
        let attention = Attention::new().paged(most.map_or(pages, |most| pages.with_most_keys(most)));
        let attention = lengths.map_or(attention, |lengths| attention.key_lengths(lengths));
        attention.problem(&q.view(), &pool.view(), &pool.view()).err()
    };
    assert_eq!(said(&[0, 1, 2, 3], 2, None, None), None);
    assert_eq!(said(&[0, -1, 99, 99], 2, None, Some(&[16, 0])), None);
    let page = |sequence, place, given| Some(Error::Page { sequence, place, given, pages: 4 });
    assert_eq!(said(&[0, 1, 2, 4], 2, None, None), page(1, 1, 4));
    assert_eq!(said(&[0, -1, 2, 3], 2, None, Some(&[17, 0])), page(0, 1, -1));
    let none = Error::Page { sequence: 0, place: 0, given: 3, pages: 0 };
    assert!(none.to_string().contains("is 3, but the pool has no pages. Give"), "{none}");
    let narrow = Error::PageTable { given: 2, needed: 3, len_k: 33, page: 16 };
    assert_eq!(said(&[0, 1, 2, 3], 2, Some(33), None), Some(narrow));
    let long = said(&[0, 1, 2, 3], 2, Some(20), Some(&[21, 0]));
    assert_eq!(long, Some(Error::KeyLength { entry: 0, given: 21, len_k: 20 }));
    let one_row = Attention::new().paged(Pages::new(&Tensor::indices(&[0, 1], [1, 2]).unwrap())).problem(
        &q.view(),
        &pool.view(),
        &pool.view(),
    );
    assert!(matches!(one_row, Err(Error::SizeMismatch { tensor: Name::Pages, given: 1, expected: 2, .. })));
    let gradients: Result<Problem, _> = "2x1x1x2 f32 page=16/4 backward".parse();
    assert!(matches!(gradients, Err(Error::Layouts { .. })));
}
