//! Signature: the tensors of a problem, in order. Whoever walks over the tensors of a call walks over this.

use crate::{DType, Keys, Name, Pass, Problem, Queries};

/// Whether a tensor is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// It is read.
    In,
    /// It is written.
    Out,
    /// It is read, and some of its rows are written: a cache that new keys are appended to.
    Changed,
}

/// What the rows of a tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Rows {
    /// One per query of a query head.
    Queries,
    /// One per key of a key head.
    Keys,
    /// One for all keys of a key head.
    Heads,
    /// One for each block of keys of a key head.
    Blocks,
    /// One per new key of a key head.
    NewKeys,
    /// One per position of a sequence.
    Positions,
    /// Numbers that say where the rows of other tensors belong.
    Places,
}

impl Rows {
    /// What one of them is, and several.
    pub const fn words(self) -> [&'static str; 2] {
        match self {
            Rows::Queries => ["query", "queries"],
            Rows::Keys => ["key", "keys"],
            Rows::Heads => ["kv head", "kv heads"],
            Rows::Blocks => ["block of keys", "blocks of keys"],
            Rows::NewKeys => ["new key", "new keys"],
            Rows::Positions => ["position", "positions"],
            Rows::Places => ["row of places", "rows of places"],
        }
    }
}

/// A tensor of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Parameter {
    /// Its name.
    pub name: Name,
    /// Whether it is read or written.
    pub role: Role,
    /// Its element type.
    pub dtype: DType,
    /// What its rows are.
    pub rows: Rows,
    /// Sizes as (batch, heads, length, head_dim).
    pub shape: [usize; 4],
    /// The tensor that decides each of the sizes.
    pub decided_by: [Name; 4],
    /// What addresses and distances between rows must be multiples of for the kernels with tensor cores, in bytes.
    pub alignment: usize,
}

/// How many names of tensors there are.
const MOST: usize = 22;

/// The tensors of a problem, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature {
    parameters: [Parameter; MOST],
    count: usize,
}

/// Alignment of addresses and row strides: the kernels with tensor cores move 16 bytes at once.
const ALIGNMENT: usize = 16;

impl Problem {
    /// The tensors of the problem, in order.
    pub fn signature(&self) -> Signature {
        let Problem {
            pass,
            batch,
            heads_q,
            heads_kv,
            len_q,
            len_k,
            queries,
            keys,
            head_dim,
            head_dim_v,
            dtype,
            append,
            lse,
            ..
        } = *self;
        // Who knows how many sequences there are.
        let sequences = match (queries, keys) {
            (Queries::Packed { .. }, _) => Name::QStarts,
            (Queries::Dense, _) => Name::Q,
        };
        let tensor = |name, role, rows, dim: usize, [of_heads, of_dim]: [Name; 2]| {
            let ([first, heads, len], of_first) = match (rows, queries, keys) {
                (Rows::Queries, Queries::Dense, _) => ([batch, heads_q, len_q], sequences),
                (Rows::Queries, Queries::Packed { total }, _) => ([1, heads_q, total], Name::QStarts),
                (Rows::Keys, _, Keys::Dense) => ([batch, heads_kv, len_k], sequences),
                (Rows::Keys, _, Keys::Packed { total } | Keys::Apart { total }) => {
                    ([1, heads_kv, total], Name::KStarts)
                }
                (Rows::Keys, _, Keys::Paged { page, pages }) => ([pages, heads_kv, page], Name::K),
                (Rows::Heads, ..) => ([batch, heads_kv, 1], sequences),
                (Rows::Blocks, ..) => {
                    let blocks = self.descale_keys.map_or(1, |keys| len_k.div_ceil(keys.max(1)));
                    ([batch, heads_kv, blocks], sequences)
                }
                (Rows::NewKeys, ..) => match append.map(|append| (append.len, append.total)) {
                    Some((_, Some(total))) => ([1, heads_kv, total], Name::NewStarts),
                    of => ([batch, heads_kv, of.map_or(0, |(len, _)| len)], sequences),
                },
                (Rows::Positions, ..) => {
                    let table = append.and_then(|append| append.rotary).map_or(0, |rotary| rotary.table);
                    ([1, 1, table], Name::Cos)
                }
                (Rows::Places, ..) => ([1, 1, 1], sequences),
            };
            let decided_by = [of_first, of_heads, of_heads, of_dim];
            Parameter {
                name,
                role,
                dtype,
                rows,
                shape: [first, heads, len, dim],
                decided_by,
                alignment: ALIGNMENT,
            }
        };
        // A tensor with the shape of another one's gradient.
        let like_q = |name, role| tensor(name, role, Rows::Queries, head_dim, [Name::Q, Name::Q]);
        let of_keys = |name, role, dim, of_dim| Parameter {
            dtype: self.dtype_kv(),
            ..tensor(name, role, Rows::Keys, dim, [Name::K, of_dim])
        };
        let like_k = |name, role| of_keys(name, role, head_dim, Name::Q);
        let like_v = |name, role| of_keys(name, role, head_dim_v, Name::V);
        let like_o = |name, role| Parameter {
            dtype: self.out(),
            ..tensor(name, role, Rows::Queries, head_dim_v, [Name::Q, Name::V])
        };
        let number = |name, role, rows, of_heads| Parameter {
            dtype: DType::F32,
            alignment: DType::F32.size(),
            ..tensor(name, role, rows, 1, [of_heads, Name::Q])
        };
        let like_lse = |name, role| number(name, role, Rows::Queries, Name::Q);
        let (read, written) = (Role::In, Role::Out);
        let places = |name, first: usize, entries: usize| Parameter {
            dtype: DType::I32,
            alignment: DType::I32.size(),
            shape: [first, 1, 1, entries],
            ..tensor(name, read, Rows::Places, entries, [name, sequences])
        };
        let starts = |name| places(name, 1, batch.saturating_add(1));
        let q_starts = matches!(queries, Queries::Packed { .. }).then(|| starts(Name::QStarts));
        let of_keys_places = match keys {
            Keys::Dense => None,
            Keys::Packed { .. } | Keys::Apart { .. } => Some(starts(Name::KStarts)),
            Keys::Paged { page, .. } => Some(places(Name::Pages, batch, len_k.div_ceil(page.max(1)))),
        };
        let cache = if append.is_some() { Role::Changed } else { read };
        let inputs = [like_q(Name::Q, read), like_k(Name::K, cache), like_v(Name::V, cache)];
        let appended = append.map(|append| {
            let new = |name, dim, of_dim| {
                let mut new = tensor(name, read, Rows::NewKeys, dim, [Name::K, of_dim]);
                new.decided_by[2] = Name::NewK;
                new
            };
            let turning = append.rotary.map(|rotary| {
                let table = |name| tensor(name, read, Rows::Positions, rotary.dim / 2, [Name::Cos; 2]);
                let positions = rotary.positions.then(|| places(Name::Positions, 1, batch));
                [Some(table(Name::Cos)), Some(table(Name::Sin)), positions]
            });
            let [cos, sin, positions] = turning.unwrap_or_default();
            let starts = append.total.map(|_| starts(Name::NewStarts));
            let (k, v) = (new(Name::NewK, head_dim, Name::Q), new(Name::NewV, head_dim_v, Name::V));
            [Some(k), Some(v), starts, cos, sin, positions]
        });
        let appended = appended.unwrap_or_default().into_iter().flatten();
        let rest = match pass {
            Pass::Forward => {
                let results = [Some(like_o(Name::O, written)), lse.then(|| like_lse(Name::Lse, written))];
                [results[0], results[1], None, None, None, None, None]
            }
            Pass::Backward => [
                Some(like_o(Name::O, read)),
                Some(like_lse(Name::Lse, read)),
                Some(like_o(Name::Do, read)),
                lse.then(|| like_lse(Name::Dlse, read)),
                Some(like_q(Name::Dq, written)),
                Some(like_k(Name::Dk, written)),
                Some(like_v(Name::Dv, written)),
            ],
        };
        let names = Name::DESCALES.into_iter().zip(self.descales).filter(|(_, there)| *there);
        let rows = |name| match self.descale_keys {
            Some(_) if name != Name::QDescale => Rows::Blocks,
            _ => Rows::Heads,
        };
        let descales = names.map(|(name, _)| number(name, read, rows(name), Name::K));
        let mut signature = Signature { parameters: [inputs[0]; MOST], count: 0 };
        let places = [q_starts, of_keys_places].into_iter().flatten();
        let beside = descales.chain(places).chain(appended);
        for parameter in inputs.into_iter().chain(beside).chain(rest.into_iter().flatten()) {
            signature.parameters[signature.count] = parameter;
            signature.count += 1;
        }
        signature
    }
}

impl Parameter {
    /// Where one of its rows is: batch entry, head, and row in the head. Rows are counted in that order.
    pub fn row(&self, index: usize) -> [usize; 3] {
        let [_, heads, len, _] = self.shape.map(|size| size.max(1));
        [index / (heads * len), index / len % heads, index % len]
    }
}

impl Signature {
    /// The tensors, in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Parameter> {
        self.parameters[..self.count].iter()
    }

    /// The tensors that are read, those that change among them.
    pub fn inputs(&self) -> impl Iterator<Item = &Parameter> {
        self.iter().filter(|parameter| parameter.role != Role::Out)
    }

    /// The tensors that are read, and written in part.
    pub fn changed(&self) -> impl Iterator<Item = &Parameter> {
        self.iter().filter(|parameter| parameter.role == Role::Changed)
    }

    /// The tensors that are written.
    pub fn outputs(&self) -> impl Iterator<Item = &Parameter> {
        self.iter().filter(|parameter| parameter.role == Role::Out)
    }
}

impl<'a> IntoIterator for &'a Signature {
    type Item = &'a Parameter;
    type IntoIter = std::slice::Iter<'a, Parameter>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Something for each tensor of a call, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PerTensor<T> {
    values: [Option<T>; MOST],
}

/// Where a tensor stands in [`PerTensor`].
fn place(name: Name) -> usize {
    match name {
        Name::Q => 0,
        Name::K => 1,
        Name::V => 2,
        Name::O => 3,
        Name::Lse => 4,
        Name::Do => 5,
        Name::Dlse => 6,
        Name::Dq => 7,
        Name::Dk => 8,
        Name::Dv => 9,
        Name::QDescale => 10,
        Name::KDescale => 11,
        Name::VDescale => 12,
        Name::QStarts => 13,
        Name::KStarts => 14,
        Name::Pages => 15,
        Name::NewK => 16,
        Name::NewV => 17,
        Name::NewStarts => 18,
        Name::Cos => 19,
        Name::Sin => 20,
        Name::Positions => 21,
        Name::KeyLengths | Name::Tensor => unreachable!("no tensor of a signature"),
    }
}

impl<T> Default for PerTensor<T> {
    fn default() -> Self {
        Self { values: [const { None }; MOST] }
    }
}

impl<T> PerTensor<T> {
    /// With something for one tensor more.
    pub fn with(mut self, name: Name, value: T) -> Self {
        self.set(name, value);
        self
    }

    /// Without what there is for some tensors.
    pub(crate) fn without(mut self, names: [Name; 2]) -> Self {
        for name in names {
            self.values[place(name)] = None;
        }
        self
    }

    /// Says what there is for a tensor.
    pub fn set(&mut self, name: Name, value: T) {
        self.values[place(name)] = Some(value);
    }

    /// What there is for a tensor.
    pub fn get(&self, name: Name) -> Option<&T> {
        self.values[place(name)].as_ref()
    }

    /// What there is for a tensor, to be changed.
    pub fn get_mut(&mut self, name: Name) -> Option<&mut T> {
        self.values[place(name)].as_mut()
    }

    /// What there is for several tensors, to be changed; the names differ.
    pub fn get_each_mut<const N: usize>(&mut self, names: [Name; N]) -> [Option<&mut T>; N] {
        let each = self.values.get_disjoint_mut(names.map(place)).expect("names that differ");
        each.map(Option::as_mut)
    }

    /// The same with every value changed.
    #[cfg(feature = "cuda")]
    pub(crate) fn map<U>(&self, mut change: impl FnMut(&T) -> U) -> PerTensor<U> {
        PerTensor { values: self.values.each_ref().map(|value| value.as_ref().map(&mut change)) }
    }
}

impl<T> std::ops::Index<Name> for PerTensor<T> {
    type Output = T;

    fn index(&self, name: Name) -> &T {
        self.get(name).unwrap_or_else(|| panic!("the call has no {name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_lists_inputs_and_outputs_with_their_shapes() {
        let problem: Problem = "2x8/2x5/7x64/32 bf16".parse().unwrap();
        let shapes: Vec<(String, [usize; 4])> =
            problem.signature().iter().map(|it| (it.name.to_string(), it.shape)).collect();
        let expected =
            [("q", [2, 8, 5, 64]), ("k", [2, 2, 7, 64]), ("v", [2, 2, 7, 32]), ("o", [2, 8, 5, 32])];
        assert_eq!(shapes, expected.map(|(name, shape)| (name.to_string(), shape)));
        let with_lse = problem.with_lse().signature();
        let outputs: Vec<Name> = with_lse.outputs().map(|it| it.name).collect();
        assert_eq!(outputs, [Name::O, Name::Lse]);
        let lse = with_lse.outputs().last().unwrap();
        assert_eq!((lse.shape, lse.dtype), ([2, 8, 5, 1], DType::F32));
    }

    #[test]
    fn packed_and_paged_signatures_say_where_the_rows_of_sequences_are() {
        let of = |text: &str| -> Vec<(String, [usize; 4])> {
            let problem: Problem = text.parse().unwrap();
            problem.signature().iter().map(|it| (it.name.to_string(), it.shape)).collect()
        };
        let named = |all: &[(&str, [usize; 4])]| -> Vec<_> {
            all.iter().map(|&(name, shape)| (name.to_string(), shape)).collect()
        };
        let packed = [
            ("q", [1, 8, 30, 64]),
            ("k", [1, 2, 70, 64]),
            ("v", [1, 2, 70, 32]),
            ("q_starts", [1, 1, 1, 4]),
            ("k_starts", [1, 1, 1, 4]),
            ("o", [1, 8, 30, 32]),
            ("lse", [1, 8, 30, 1]),
        ];
        assert_eq!(of("3x8/2x20/50x64/32 bf16 packed=30/70 lse"), named(&packed));
        let paged = [
            ("q", [3, 8, 20, 64]),
            ("k", [99, 2, 16, 64]),
            ("v", [99, 2, 16, 64]),
            ("k_descale", [3, 2, 1, 1]),
            ("pages", [3, 1, 1, 4]),
            ("o", [3, 8, 20, 64]),
        ];
        assert_eq!(of("3x8/2x20/50x64 bf16 kv=f8 descales=k page=16/99"), named(&paged));
        let problem: Problem = "3x8/2x20/50x64 packed-q=30 page=16/99".parse().unwrap();
        let places =
            problem.signature().iter().filter(|it| it.rows == Rows::Places).copied().collect::<Vec<_>>();
        assert_eq!(places.iter().map(|it| it.dtype).collect::<Vec<_>>(), [DType::I32; 2]);
    }

    #[test]
    fn eight_bit_inputs_have_their_descales_and_an_output_of_its_own_type() {
        let of = |text: &str| text.parse::<Problem>().unwrap().signature();
        let shapes: Vec<_> = of("2x8/2x5/7x64/32 f8 descales=qv out=f16")
            .iter()
            .map(|it| (it.name, it.dtype, it.shape))
            .collect();
        let expected = [
            (Name::Q, DType::F8E4M3, [2, 8, 5, 64]),
            (Name::K, DType::F8E4M3, [2, 2, 7, 64]),
            (Name::V, DType::F8E4M3, [2, 2, 7, 32]),
            (Name::QDescale, DType::F32, [2, 2, 1, 1]),
            (Name::VDescale, DType::F32, [2, 2, 1, 1]),
            (Name::O, DType::F16, [2, 8, 5, 32]),
        ];
        assert_eq!(shapes, expected);
        let shapes = of("2x8/2x5/300x64 f8 descales=qv/128");
        let shapes: Vec<_> = shapes.iter().skip(3).take(2).map(|it| (it.rows, it.shape)).collect();
        assert_eq!(shapes, [(Rows::Heads, [2, 2, 1, 1]), (Rows::Blocks, [2, 2, 3, 1])]);
        assert_eq!(of("1x1x1x16 f8").outputs().next().unwrap().dtype, DType::BF16);
    }

    #[test]
    fn a_backward_signature_reads_what_the_forward_one_has_and_writes_gradients_of_its_inputs() {
        let problem: Problem = "2x8/2x5/7x64/32 bf16 lse".parse().unwrap();
        let (forward, backward) = (problem.signature(), problem.backward().signature());
        let shapes = |all: &mut dyn Iterator<Item = &Parameter>| -> Vec<_> {
            all.map(|it| (it.shape, it.rows, it.dtype)).collect()
        };
        let outputs: Vec<String> = backward.outputs().map(|it| it.name.to_string()).collect();
        assert_eq!(outputs, ["dq", "dk", "dv"]);
        assert_eq!(shapes(&mut backward.outputs()), shapes(&mut forward.inputs()));
        assert_eq!(shapes(&mut backward.inputs().take(5)), shapes(&mut forward.iter()));
        assert_eq!(shapes(&mut backward.inputs().skip(5)), shapes(&mut forward.outputs()));
        let without: Vec<Name> = "1x1x1x1 f32 backward"
            .parse::<Problem>()
            .unwrap()
            .signature()
            .inputs()
            .map(|it| it.name)
            .collect();
        assert_eq!(without, [Name::Q, Name::K, Name::V, Name::O, Name::Lse, Name::Do]);
    }
}
