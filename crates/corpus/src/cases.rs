//! The corpus: cases in TOML, one set for every engine.
//!
//! Each file under `cases/` holds `[[case]]` tables. A field given as a list stands for one case per entry, and several
//! lists for all their combinations, so that a table of ten lines stands for many cases. With `cover` they stand for a
//! [covering design](flashcore_judge::cover) instead: every pair of entries of two lists, in few cases. The binary
//! contains the files, so `flashcore verify` needs nothing else.

use flashcore::{Appending, DType, Keys, Mask, Pass, Problem, Queries, Turning};
use serde::{Deserialize, Serialize};

use flashcore_judge::cover;
use flashcore_judge::guarded::Arrangement;
use flashcore_judge::inputs::{Distribution, Wild};
use flashcore_judge::operands::Operands;
use flashcore_judge::placing::{self, Placing};
use flashcore_judge::rng::Rng;

/// The files of the corpus, by the prefix of their cases' names.
const FILES: [(&str, &str); 14] = [
    ("lengths", include_str!("../../../cases/lengths.toml")),
    ("masks", include_str!("../../../cases/masks.toml")),
    ("heads", include_str!("../../../cases/heads.toml")),
    ("inputs", include_str!("../../../cases/inputs.toml")),
    ("edges", include_str!("../../../cases/edges.toml")),
    ("wide", include_str!("../../../cases/wide.toml")),
    ("cover", include_str!("../../../cases/cover.toml")),
    ("wild", include_str!("../../../cases/wild.toml")),
    ("eight", include_str!("../../../cases/eight.toml")),
    ("cache", include_str!("../../../cases/cache.toml")),
    ("rows", include_str!("../../../cases/rows.toml")),
    ("packed", include_str!("../../../cases/packed.toml")),
    ("paged", include_str!("../../../cases/paged.toml")),
    ("append", include_str!("../../../cases/append.toml")),
];

/// When a case runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tier {
    /// Always.
    Quick,
    /// Only in a full run.
    Full,
}

/// A problem with its inputs: what verify runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// File, table, and the values taken from its lists.
    pub name: String,
    /// When it runs.
    pub tier: Tier,
    /// The problem.
    pub problem: Problem,
    /// How many queries each sequence has, where not all of them have as many.
    pub query_lengths: Option<Vec<u32>>,
    /// How many keys each batch entry has.
    pub key_lengths: Option<Vec<u32>>,
    /// How many keys are appended to each sequence, where that differs; key lengths count them.
    pub new_lengths: Option<Vec<u32>>,
    /// How the tensors lie in memory.
    pub arrangement: Arrangement,
    /// The distribution of the values.
    pub inputs: Distribution,
    /// The element that is NaN or infinite, if there is one.
    pub wild: Option<Wild>,
    /// The seed of the inputs.
    pub seed: u64,
    /// How many rows are judged; all by default.
    pub rows: Option<usize>,
}

impl Case {
    /// A quick case of normal numbers, all of whose rows are judged.
    pub fn new(name: &str, problem: Problem) -> Self {
        Self {
            name: name.into(),
            tier: Tier::Quick,
            problem,
            query_lengths: None,
            key_lengths: None,
            new_lengths: None,
            arrangement: Arrangement::Bhsd,
            inputs: Distribution::Normal,
            wild: None,
            seed: 42,
            rows: None,
        }
    }

    /// Draws the case's inputs.
    pub fn operands(&self) -> Operands {
        let operands = self.operands_from(self.seed);
        match self.wild {
            Some(wild) => operands.with_wild(wild, self.seed),
            None => operands,
        }
    }

    /// The backward pass of the same problem, with gradients of o, and of lse where that is asked for; larger ones only in a
    /// full run. None where the truth would take long, or is about an element that is NaN or infinite, and none of f8.
    pub fn backward(&self) -> Option<Self> {
        let Problem { batch, heads_q, len_q, len_k, head_dim, head_dim_v, .. } = self.problem;
        let sizes = [batch, heads_q, len_q, len_k, head_dim + head_dim_v];
        let work = sizes.into_iter().fold(1, usize::saturating_mul);
        let tier = if work <= QUICK_BACKWARD { self.tier } else { Tier::Full };
        let judged = self.wild.is_none() && self.rows.is_none() && work <= MOST_BACKWARD;
        let no_gradients = matches!(self.problem.keys, Keys::Paged { .. } | Keys::Apart { .. });
        let judged = judged && !self.problem.is_eight_bit() && !no_gradients && self.problem.append.is_none();
        let name = format!("{}/{}", Pass::Backward, self.name);
        judged.then(|| Self { name, tier, problem: self.problem.backward(), ..self.clone() })
    }

    /// Draws inputs of the same kind from another seed.
    pub fn operands_from(&self, seed: u64) -> Operands {
        let Problem { batch, len_q, len_k, .. } = self.problem;
        let draw =
            |problem, lengths, arrangement| Operands::draw(problem, lengths, arrangement, self.inputs, seed);
        if self.problem.is_dense() && self.problem.append.is_none() {
            return draw(self.problem, self.key_lengths.clone(), self.arrangement);
        }
        let all = |len: usize| vec![len as u32; batch];
        let queries = self.query_lengths.clone().unwrap_or_else(|| all(len_q));
        let keys = self.key_lengths.clone().unwrap_or_else(|| all(len_k));
        let placing = Placing::new(self.problem, self.arrangement, queries, keys.clone(), seed);
        let placing = match &self.new_lengths {
            Some(new) => placing.with_new(new.clone()),
            None => placing,
        };
        draw(Placing::dense(self.problem), Some(keys), Arrangement::Bhsd).with_placing(placing)
    }
}

/// Every case of the corpus. Panics if a file is wrong, which the tests of this crate rule out.
pub fn corpus() -> Vec<Case> {
    FILES.iter().flat_map(|(file, text)| parse(file, text).unwrap_or_else(|why| panic!("{why}"))).collect()
}

/// Which passes are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passes {
    /// One of them.
    One(Pass),
    /// Forward, then backward.
    Both,
}

impl Passes {
    /// In the order in which they are run.
    pub fn all(self) -> &'static [Pass] {
        match self {
            Passes::One(Pass::Forward) => &[Pass::Forward],
            Passes::One(Pass::Backward) => &[Pass::Backward],
            Passes::Both => &Pass::ALL,
        }
    }

    /// The word for them.
    pub fn name(self) -> &'static str {
        match self {
            Passes::One(pass) => pass.name(),
            Passes::Both => "both",
        }
    }

    /// The pass whose results are the last.
    pub fn last(self) -> Pass {
        if self == Passes::One(Pass::Forward) { Pass::Forward } else { Pass::Backward }
    }
}

impl From<Pass> for Passes {
    fn from(pass: Pass) -> Self {
        Passes::One(pass)
    }
}

impl std::str::FromStr for Passes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "both" => Ok(Passes::Both),
            _ => text.parse().map(Passes::One).map_err(|_| "possible are forward, backward and both".into()),
        }
    }
}

impl std::fmt::Display for Passes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Every case of the corpus in some passes.
pub fn corpus_of(passes: Passes) -> Vec<Case> {
    let forward = corpus();
    let mut cases: Vec<Case> = match passes {
        Passes::One(Pass::Forward) => return forward,
        Passes::One(Pass::Backward) => Vec::new(),
        Passes::Both => forward.clone(),
    };
    cases.extend(forward.iter().filter_map(Case::backward));
    cases
}

/// The cases of one file's text.
pub fn parse(file: &str, text: &str) -> Result<Vec<Case>, String> {
    let parsed: File = toml::from_str(text).map_err(|error| format!("cases/{file}.toml: {error}"))?;
    let mut cases = Vec::new();
    for table in &parsed.case {
        cases.extend(table.expand(file).map_err(|why| format!("cases/{file}.toml, {}: {why}", table.name))?);
    }
    let mut names: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("cases/{file}.toml: two cases are named {}", pair[0])),
        None => Ok(cases),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    case: Vec<Table>,
}

/// A field that may be a list.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Many<T> {
    One(T),
    List(Vec<T>),
}

/// The most products of elements in the scores and outputs of a backward case, as if there were no mask: its truth takes
/// ten times as many.
const MOST_BACKWARD: usize = 80_000_000;

/// The same of a quick one.
const QUICK_BACKWARD: usize = 12_000_000;

/// The most cases of one table: lists multiply.
const MOST_CASES: usize = 100_000;

impl<T> Many<T> {
    fn try_map<U>(&self, read: impl Fn(&T) -> Result<U, String>) -> Result<Many<U>, String> {
        Ok(match self {
            Many::One(value) => Many::One(read(value)?),
            Many::List(values) => Many::List(values.iter().map(read).collect::<Result<_, _>>()?),
        })
    }
}

/// One `[[case]]` table. Absent fields have the defaults of [`Table::expand`].
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    name: String,
    tier: Tier,
    dtype: Option<Many<String>>,
    /// The type of k and v, where it is not that of q.
    kv: Option<Many<String>>,
    /// The type of o, where that of q, k and v leaves a choice.
    out: Option<Many<String>>,
    /// Whether q, k and v have descales: `all`, `none`, or letters of those that do; with `/128` behind it, those of k and v are
    /// for each so many keys.
    descales: Option<Many<String>>,
    batch: Option<Many<usize>>,
    heads: Option<Many<usize>>,
    heads_kv: Option<Many<usize>>,
    /// Query heads per kv head, instead of `heads`.
    group: Option<Many<usize>>,
    /// The length of both queries and keys; `len_q` and `len_k` where they differ.
    len: Option<Many<usize>>,
    len_q: Option<Many<usize>>,
    len_k: Option<Many<usize>>,
    head_dim: Option<Many<usize>>,
    head_dim_v: Option<Many<usize>>,
    mask: Option<Many<String>>,
    scale: Option<Many<f32>>,
    softcap: Option<Many<f32>>,
    /// `q`, `k` or `qk`: which of queries and keys are packed.
    packed: Option<Many<String>>,
    /// Keys of a page, where keys lie in pages.
    page: Option<Many<usize>>,
    /// Whether sequences begin anywhere in a tensor of keys.
    apart: Option<Many<bool>>,
    /// New keys of each sequence, which the call appends; key lengths count them.
    append: Option<Many<usize>>,
    /// How many are appended to each sequence, where that differs.
    new_lengths: Option<Vec<u32>>,
    /// Elements that are turned, with `/interleaved`, `/positions` or both behind it.
    rotary: Option<Many<String>>,
    query_lengths: Option<KeyLengths>,
    key_lengths: Option<KeyLengths>,
    lse: Option<Many<bool>>,
    arrangement: Option<Many<Arrangement>>,
    inputs: Option<Many<Distribution>>,
    wild: Option<Many<Wild>>,
    seed: Option<Many<u64>>,
    /// How many rows are judged, chosen once a result exists; all by default.
    rows: Option<usize>,
    /// Every pair of entries of two lists, rather than all combinations, with at most this many multiply-adds per case.
    cover: Option<u64>,
}

/// How many keys, or queries, batch entries have.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum KeyLengths {
    /// One number per batch entry; the same for all combinations.
    Given(Vec<u32>),
    /// Whether each batch entry has its own number, drawn from the seed.
    Drawn(Many<bool>),
}

/// One choice from a table's lists: a draft, and the parts of its name that come from the lists.
#[derive(Clone)]
struct Draft {
    suffix: String,
    dtype: DType,
    kv: Option<DType>,
    out: Option<DType>,
    descales: [bool; 3],
    descale_keys: Option<usize>,
    sizes: Sizes,
    mask: Mask,
    scale: Option<f32>,
    softcap: f32,
    lse: bool,
    packed: [bool; 2],
    page: Option<usize>,
    apart: bool,
    append: Option<usize>,
    rotary: String,
    draws_lengths: bool,
    arrangement: Arrangement,
    inputs: Distribution,
    wild: Option<Wild>,
    seed: u64,
}

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    heads: usize,
    heads_kv: Option<usize>,
    group: Option<usize>,
    len_q: usize,
    len_k: Option<usize>,
    head_dim: usize,
    head_dim_v: Option<usize>,
}

impl Draft {
    fn heads_kv(&self) -> usize {
        self.sizes.heads_kv.unwrap_or(if self.sizes.group.is_some() { 1 } else { self.sizes.heads })
    }

    fn heads(&self) -> usize {
        self.sizes.group.map_or(self.sizes.heads, |group| group.saturating_mul(self.heads_kv()))
    }

    /// What is appended, for tables of so many positions.
    fn appending(&self, new_lengths: Option<&[u32]>, table: usize) -> Result<Appending, String> {
        let (len, total) = match (self.append, new_lengths) {
            (Some(len), None) => (len, None),
            (None, Some(lengths)) => {
                let longest = lengths.iter().max().copied().unwrap_or(0);
                (longest as usize, Some(lengths.iter().sum::<u32>() as usize))
            }
            _ => return Err("append is for all sequences, and new_lengths for each; give one of them".into()),
        };
        if self.packed[1] {
            return Err("what is appended to packed keys has no room: say apart = true instead".into());
        }
        let mut append = Appending { len, total, rotary: None };
        if !self.rotary.is_empty() {
            let mut words = self.rotary.split('/');
            let dim = words.next().unwrap_or_default().parse().map_err(say)?;
            let (mut interleaved, mut positions) = (false, false);
            for word in words {
                match word {
                    "interleaved" => interleaved = true,
                    "positions" => positions = true,
                    _ => {
                        return Err(format!(
                            "rotary '{}': possible are /interleaved and /positions",
                            self.rotary
                        ));
                    }
                }
            }
            append.rotary = Some(Turning { dim, interleaved, table, positions });
        }
        Ok(append)
    }

    /// The cost in multiply-adds as if there were no mask, including an equivalent for reading and writing.
    fn work(&self) -> u64 {
        let Sizes { batch, len_q, len_k, head_dim, head_dim_v, .. } = self.sizes;
        let len_k = len_k.unwrap_or(len_q);
        let elements = head_dim.saturating_add(head_dim_v.unwrap_or(head_dim));
        let pairs = len_q.saturating_mul(len_k).saturating_add(len_q).saturating_add(len_k);
        [batch, self.heads(), pairs, elements].into_iter().fold(1, usize::saturating_mul) as u64
    }
}

/// How a value changes a draft, given its index in the list.
type Set<'a> = Box<dyn Fn(&mut Draft, usize) + 'a>;

/// What a value is called in the names of cases.
type Label<'a> = Box<dyn Fn(usize) -> String + 'a>;

/// A field of a table, with how each of its values changes a draft.
struct Field<'a> {
    values: usize,
    /// The value that makes the least work.
    least: usize,
    set: Set<'a>,
    /// What a value adds to the case's name, if the field is a list.
    label: Option<Label<'a>>,
}

/// Adds a field, if the table has it. A list puts its values into the cases' names.
fn vary<'a, T: Clone + 'a>(
    fields: &mut Vec<Field<'a>>,
    field: Option<&'a Many<T>>,
    size: impl Fn(&T) -> usize,
    label: impl Fn(&T) -> String + 'a,
    set: impl Fn(&mut Draft, T) + 'a,
) {
    let (values, listed) = match field {
        None => return,
        Some(Many::One(value)) => (std::slice::from_ref(value), false),
        Some(Many::List(values)) => (&values[..], true),
    };
    let least = (0..values.len()).min_by_key(|&i| size(&values[i])).unwrap_or(0);
    fields.push(Field {
        values: values.len(),
        least,
        set: Box::new(move |draft, i| set(draft, values[i].clone())),
        label: if listed { Some(Box::new(move |i| label(&values[i]))) } else { None },
    });
}

/// Every way to take one value of each field, the last field's changing fastest.
fn combinations(fields: &[Field<'_>]) -> Vec<Vec<usize>> {
    fields.iter().fold(vec![Vec::new()], |rows, field| {
        let with = |row: &Vec<usize>, value| row.iter().copied().chain([value]).collect();
        rows.iter().flat_map(|row| (0..field.values).map(move |value| with(row, value))).collect()
    })
}

impl Table {
    fn expand(&self, file: &str) -> Result<Vec<Case>, String> {
        let sizes = Sizes {
            batch: 1,
            heads: 2,
            heads_kv: None,
            group: None,
            len_q: 64,
            len_k: None,
            head_dim: 64,
            head_dim_v: None,
        };
        let plain = Draft {
            suffix: String::new(),
            dtype: DType::F16,
            kv: None,
            out: None,
            descales: [false; 3],
            descale_keys: None,
            sizes,
            mask: Mask::None,
            scale: None,
            softcap: 0.0,
            lse: true,
            packed: [false; 2],
            page: None,
            apart: false,
            append: None,
            rotary: String::new(),
            draws_lengths: false,
            arrangement: Arrangement::Bhsd,
            inputs: Distribution::Normal,
            wild: None,
            seed: 1,
        };
        let mask =
            self.mask.as_ref().map(|mask| mask.try_map(|text| text.parse().map_err(say))).transpose()?;
        let dtype = match &self.dtype {
            Some(dtype) => dtype.try_map(|text| text.parse().map_err(say))?,
            None => Many::List(DType::WIDE.to_vec()),
        };
        let kv = self.kv.as_ref().map(|kv| kv.try_map(|text| text.parse().map_err(say))).transpose()?;
        let out = self.out.as_ref().map(|out| out.try_map(|text| text.parse().map_err(say))).transpose()?;
        let descales = self.descales.as_ref().map(|of| of.try_map(|text| which(text))).transpose()?;
        let packed = self.packed.as_ref().map(|of| of.try_map(|text| which_are_packed(text))).transpose()?;
        let drawn = match &self.key_lengths {
            Some(KeyLengths::Drawn(drawn)) => Some(drawn),
            _ => None,
        };
        let mut fields = Vec::new();
        let f = &mut fields;
        let (one, this) = (|| 1, |x: &usize| *x);
        vary(f, self.inputs.as_ref(), |_| one(), ToString::to_string, |d, x| d.inputs = x);
        vary(f, self.wild.as_ref(), |_| one(), ToString::to_string, |d, x| d.wild = Some(x));
        vary(f, mask.as_ref(), |_| one(), ToString::to_string, |d, x| d.mask = x);
        vary(f, self.batch.as_ref(), this, |x| format!("b{x}"), |d, x| d.sizes.batch = x);
        vary(f, self.heads.as_ref(), this, |x| format!("h{x}"), |d, x| d.sizes.heads = x);
        vary(f, self.heads_kv.as_ref(), this, |x| format!("kv{x}"), |d, x| d.sizes.heads_kv = Some(x));
        vary(f, self.group.as_ref(), this, |x| format!("g{x}"), |d, x| d.sizes.group = Some(x));
        vary(f, self.len.as_ref(), this, |x| format!("len{x}"), |d, x| d.sizes.len_q = x);
        vary(f, self.len_q.as_ref(), this, |x| format!("q{x}"), |d, x| d.sizes.len_q = x);
        vary(f, self.len_k.as_ref(), this, |x| format!("k{x}"), |d, x| d.sizes.len_k = Some(x));
        vary(f, self.head_dim.as_ref(), this, |x| format!("d{x}"), |d, x| d.sizes.head_dim = x);
        vary(f, self.head_dim_v.as_ref(), this, |x| format!("dv{x}"), |d, x| d.sizes.head_dim_v = Some(x));
        vary(f, self.scale.as_ref(), |_| one(), |x| format!("scale{x}"), |d, x| d.scale = Some(x));
        vary(f, self.softcap.as_ref(), |_| one(), |x| format!("cap{x}"), |d, x| d.softcap = x);
        vary(f, self.lse.as_ref(), |_| one(), |x| format!("lse-{x}"), |d, x| d.lse = x);
        vary(f, packed.as_ref(), |_| one(), |(name, _)| format!("packed-{name}"), |d, x| d.packed = x.1);
        vary(f, self.page.as_ref(), |_| one(), |x| format!("page{x}"), |d, x| d.page = Some(x));
        let apart = |x: &bool| if *x { "apart" } else { "dense" }.to_string();
        vary(f, self.apart.as_ref(), |_| one(), apart, |d, x| d.apart = x);
        vary(f, self.append.as_ref(), |x| *x, |x| format!("append{x}"), |d, x| d.append = Some(x));
        let turned = |x: &String| format!("rotary-{}", x.replace('/', "-"));
        vary(f, self.rotary.as_ref(), |_| one(), turned, |d, x| d.rotary = x);
        vary(f, drawn, |_| one(), |x| format!("lengths-{x}"), |d, x| d.draws_lengths = x);
        vary(f, self.arrangement.as_ref(), |_| one(), ToString::to_string, |d, x| d.arrangement = x);
        vary(f, self.seed.as_ref(), |_| one(), |x| format!("seed{x}"), |d, x| d.seed = x);
        vary(f, kv.as_ref(), |_| one(), |x| format!("cache-{x}"), |d, x| d.kv = Some(x));
        vary(f, out.as_ref(), |_| one(), |x| format!("to-{x}"), |d, x| d.out = Some(x));
        vary(
            f,
            descales.as_ref(),
            |_| one(),
            |(name, ..)| format!("descales-{}", name.replace('/', "-per-")),
            |d, (_, descales, keys)| (d.descales, d.descale_keys) = (descales, keys),
        );
        vary(f, Some(&dtype), |_| one(), ToString::to_string, |d, x| d.dtype = x);
        let draft = |row: &mut dyn Iterator<Item = usize>| {
            let mut draft = plain.clone();
            fields.iter().zip(row).for_each(|(field, value)| (field.set)(&mut draft, value));
            draft
        };
        let named = |row: &[usize]| {
            let labels =
                fields.iter().zip(row).filter_map(|(field, &value)| field.label.as_ref().map(|it| it(value)));
            let suffix = labels.fold(String::new(), |suffix, label| suffix + "-" + &label);
            Draft { suffix, ..draft(&mut row.iter().copied()) }
        };
        let count = fields.iter().map(|field| field.values).fold(1, usize::saturating_mul);
        if self.cover.is_none() && count > MOST_CASES {
            return Err(format!("its lists make {count} cases; {MOST_CASES} are the most of a table"));
        }
        let rows = match self.cover {
            None => combinations(&fields),
            Some(most) => {
                let fits = |row: &[Option<usize>]| {
                    let least = fields.iter().zip(row).map(|(field, value)| value.unwrap_or(field.least));
                    draft(&mut { least }).work() <= most
                };
                let values: Vec<usize> = fields.iter().map(|field| field.values).collect();
                cover::pairs(&values, &fits, COVER_SEED)
            }
        };
        rows.iter().map(|row| self.case(file, &named(row))).collect()
    }

    fn case(&self, file: &str, draft: &Draft) -> Result<Case, String> {
        let Sizes { batch, len_q, len_k, head_dim, head_dim_v, .. } = draft.sizes;
        let mut problem = Problem::new(batch, draft.heads(), len_q, head_dim, draft.dtype)
            .with_kv(draft.heads_kv(), len_k.unwrap_or(len_q))
            .with_head_dim_v(head_dim_v.unwrap_or(head_dim))
            .with_mask(draft.mask)
            .with_softcap(draft.softcap);
        if let Some(scale) = draft.scale {
            problem = problem.with_scale(scale);
        }
        problem = draft.kv.map_or(problem, |dtype| problem.with_dtype_kv(dtype));
        problem = draft.out.map_or(problem, |out| problem.with_out(out));
        (problem.lse, problem.descales) = (draft.lse, draft.descales);
        problem.descale_keys = draft.descale_keys;
        let [packed_q, packed_k] = draft.packed;
        let lengths = |given: &Option<KeyLengths>, drawn: bool, most: usize| match given {
            Some(KeyLengths::Given(lengths)) => Some(lengths.clone()),
            _ => drawn.then(|| draw_lengths(batch, most, draft.seed)),
        };
        let query_lengths = lengths(&self.query_lengths, packed_q, len_q);
        let draws_keys = draft.draws_lengths || packed_k || draft.page.is_some();
        let draws_keys = draws_keys || draft.apart || draft.append.is_some() || self.new_lengths.is_some();
        let mut key_lengths = lengths(&self.key_lengths, draws_keys, problem.len_k);
        if draft.append.is_some() || self.new_lengths.is_some() {
            let new = |entry: usize| match &self.new_lengths {
                Some(lengths) => lengths.get(entry).copied().unwrap_or(0),
                None => draft.append.unwrap_or(0) as u32,
            };
            for (entry, length) in key_lengths.iter_mut().flatten().enumerate() {
                *length = (*length).max(new(entry));
            }
            problem.append = Some(draft.appending(self.new_lengths.as_deref(), problem.len_k + len_q)?);
        }
        for (what, lengths, len) in
            [("query_lengths", &query_lengths, len_q), ("key_lengths", &key_lengths, problem.len_k)]
        {
            let Some(lengths) = lengths else { continue };
            let most = lengths.iter().max().copied().unwrap_or(0) as usize;
            if lengths.len() != batch || most > len {
                return Err(format!("{what} must be {batch} numbers up to {len}, but are {lengths:?}"));
            }
        }
        let total = |lengths: &Option<Vec<u32>>| lengths.iter().flatten().sum::<u32>() as usize;
        if packed_q {
            problem = problem.with_queries(Queries::Packed { total: total(&query_lengths) });
        }
        problem = match draft.page {
            Some(_) if packed_k => return Err("keys are packed or in pages, not both".into()),
            Some(0) => return Err("pages have at least one key".into()),
            Some(page) => {
                let pages = placing::pool(key_lengths.as_deref().unwrap_or_default(), page);
                problem.with_keys(Keys::Paged { page, pages })
            }
            None if draft.apart => {
                let total = placing::apart(key_lengths.as_deref().unwrap_or_default()) + SPARE_ROWS;
                problem.with_keys(Keys::Apart { total })
            }
            None if packed_k => problem.with_keys(Keys::Packed { total: total(&key_lengths) }),
            None => problem,
        };
        problem.key_lengths = key_lengths.is_some() && (!packed_k || problem.append.is_some());
        if query_lengths.is_some() && (!packed_q || draft.mask == Mask::CausalTopLeft) {
            return Err(
                "query_lengths are of packed queries, under masks that are aligned bottom-right".into()
            );
        }
        Ok(Case {
            name: format!("{file}/{}{}", self.name, draft.suffix),
            tier: self.tier,
            problem: problem.check().map_err(|error| error.to_string())?,
            query_lengths,
            key_lengths,
            new_lengths: self.new_lengths.clone(),
            arrangement: draft.arrangement,
            inputs: draft.inputs,
            wild: draft.wild,
            seed: draft.seed,
            rows: self.rows,
        })
    }
}

/// Rows of a tensor of keys that begin anywhere, behind the last.
const SPARE_ROWS: usize = 5;

/// The seed of covering designs: another seed gives other cases that cover the same pairs.
const COVER_SEED: u64 = 16;

/// A number of keys, or queries, for each batch entry: all, none or one of them now and then, and any number between. One
/// entry has at least half of them, so that there is something to see. Of as many queries and keys there are the same.
fn draw_lengths(batch: usize, all: usize, seed: u64) -> Vec<u32> {
    let mut rng = Rng::stream(seed, (batch * 1_000_003 + all) as u64);
    let one = |rng: &mut Rng| match rng.below(6) {
        0 => all,
        1 => 0,
        2 => all.min(1),
        _ => rng.below(all + 1),
    };
    let mut lengths: Vec<u32> = (0..batch).map(|_| one(&mut rng) as u32).collect();
    if !lengths.is_empty() {
        lengths[rng.below(batch)] = (all - rng.below(all / 2 + 1)) as u32;
    }
    lengths
}

/// Which of q, k and v have descales, by a name for it, and the keys of a block that has its own.
fn which(text: &str) -> Result<(String, [bool; 3], Option<usize>), String> {
    let (names, keys) = text.split_once('/').map_or((text, None), |(names, keys)| (names, Some(keys)));
    let keys = keys.map(str::parse::<usize>).transpose();
    let letters = match names {
        "all" => "qkv",
        "none" => "",
        letters => letters,
    };
    if letters.chars().any(|letter| !"qkv".contains(letter)) {
        return Err(format!("descales '{text}': possible are all, none, or letters of q, k and v"));
    }
    let keys = keys.map_err(|_| format!("descales '{text}': behind the slash is a number of keys"))?;
    Ok((text.into(), ['q', 'k', 'v'].map(|letter| letters.contains(letter)), keys))
}

/// Which of queries and keys are packed, by a name for it.
fn which_are_packed(text: &str) -> Result<(String, [bool; 2]), String> {
    match text {
        "q" | "k" | "qk" => Ok((text.into(), ['q', 'k'].map(|letter| text.contains(letter)))),
        _ => Err(format!("packed '{text}': possible are q, k and qk")),
    }
}

fn say(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Reads the sides of a window: `LEFT,RIGHT`, each a number of keys or `inf`.
pub fn parse_window(text: &str) -> Result<Mask, String> {
    format!("window({text})").parse().map_err(|_| {
        format!(
            "'{text}' is not a window; give LEFT,RIGHT: how many keys before and after its own place a query sees, each a \
             number or inf, such as 128,0"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_multiply_out_and_name_their_cases() {
        let text =
            "[[case]]\nname = 'x'\ntier = 'quick'\nlen = [3, 5]\ndtype = ['f16', 'f32']\nmask = 'causal'";
        let cases = parse("file", text).unwrap();
        let names: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(names, ["file/x-len3-f16", "file/x-len3-f32", "file/x-len5-f16", "file/x-len5-f32"]);
        assert_eq!(cases[3].problem.len_k, 5);
        assert!(cases.iter().all(|case| case.problem.mask == Mask::Causal));
    }

    #[test]
    fn a_wrong_table_is_refused_with_its_place() {
        let refuse = |body: &str| {
            let text = format!("[[case]]\nname = 'x'\ntier = 'quick'\n{body}");
            parse("file", &text).unwrap_err()
        };
        assert!(refuse("lenght = 3").contains("lenght"));
        assert!(refuse("dtype = 'f17'").contains("bf16"));
        assert!(refuse("dtype = 'f8'\ndescales = 'qz'").contains("letters"));
        assert!(refuse("descales = 'q'").contains("descales"));
        assert!(refuse("dtype = 'f8'\nout = 'f32'").contains("bf16 or f16"));
        assert!(refuse("mask = 'diagonal'").contains("causal-top-left"));
        assert!(refuse("batch = 2\nkey_lengths = [1]").contains("2 numbers"));
        assert!(refuse("packed = 'v'").contains("possible are q, k and qk"));
        assert!(refuse("packed = 'q'\nquery_lengths = [65]").contains("up to 64"));
        assert!(refuse("query_lengths = [3]").contains("packed queries"));
        assert!(refuse("packed = 'qk'\npage = 16").contains("not both"));
        assert!(refuse("packed = 'qk'\nmask = 'causal-top-left'").contains("bottom-right"));
        assert!(refuse("heads = 3\nheads_kv = 2").contains("multiple"));
        assert!(refuse("seed = [1, 1]").contains("two cases are named"));
        let many: Vec<String> = (1..=100).map(|n| n.to_string()).collect();
        let many = many.join(", ");
        assert!(
            refuse(&format!("len = [{many}]\nseed = [{many}]\nbatch = [{many}]")).contains("3000000 cases")
        );
    }

    #[test]
    fn the_corpus_holds_every_length_distribution_arrangement_and_dtype() {
        let corpus = corpus();
        for length in [1, 2, 7, 63, 64, 65, 97, 127, 129, 200, 257, 511, 513, 1025] {
            for dtype in DType::WIDE {
                let with = |case: &&Case| case.problem.len_q == length && case.problem.dtype == dtype;
                assert!(corpus.iter().find(with).is_some(), "{length} {dtype}");
            }
        }
        for tier in [Tier::Quick, Tier::Full] {
            let of = || corpus.iter().filter(|case| case.tier <= tier);
            for distribution in Distribution::ALL {
                for dtype in DType::WIDE {
                    let with = |case: &Case| case.inputs == distribution && case.problem.dtype == dtype;
                    assert!(of().any(with), "{distribution} {dtype}");
                }
            }
            for arrangement in Arrangement::ALL {
                assert!(of().any(|case| case.arrangement == arrangement), "{arrangement}");
            }
        }
    }

    #[test]
    fn the_quick_corpus_asks_for_everything_that_a_problem_can() {
        let corpus: Vec<Case> = corpus().into_iter().filter(|case| case.tier == Tier::Quick).collect();
        let has = |what: &str, with: &dyn Fn(&Problem) -> bool| {
            assert!(corpus.iter().any(|case| with(&case.problem)), "{what}");
        };
        has("a window", &|p| matches!(p.mask, Mask::Window { left: Some(_), right: Some(_) }));
        has("a half-open window", &|p| matches!(p.mask, Mask::Window { left: Some(_), right: None }));
        has("top-left causal with other lengths", &|p| p.mask == Mask::CausalTopLeft && p.len_q != p.len_k);
        has("causal with more queries than keys", &|p| p.mask == Mask::Causal && p.len_q > p.len_k);
        has("grouped heads", &|p| p.heads_kv > 1 && p.group() > 1);
        has("one kv head", &|p| p.heads_kv == 1 && p.heads_q > 1);
        has("another head_dim for v", &|p| p.head_dim_v != p.head_dim);
        has("a softcap", &|p| p.softcap.is_some());
        has("a scale", &|p| p.scale != flashcore::default_scale(p.head_dim));
        has("key lengths under a causal mask", &|p| p.key_lengths && p.mask == Mask::Causal);
        has("no lse", &|p| !p.lse);
        has("many batch entries", &|p| p.batch > 64);
        has("many heads", &|p| p.heads_q > 64);
        has("several kv heads of groups", &|p| p.heads_kv > 4 && p.group() > 2);
        has("many queries", &|p| p.len_q > 4600);
        has("many keys", &|p| p.len_k > 16400);
        has("a softcap far beyond the scores", &|p| p.softcap == Some(1e30));
        has("a softcap far below the scores", &|p| p.softcap == Some(1e-3));
        has("no queries", &|p| p.len_q == 0 && p.len_k > 0);
        has("no keys", &|p| p.len_k == 0 && p.len_q > 0);
        has("no batch", &|p| p.batch == 0);
        has("decode", &|p| p.len_q == 1 && p.len_k > 256);
        has("packed queries and keys", &|p| {
            matches!((p.queries, p.keys), (Queries::Packed { .. }, Keys::Packed { .. }))
        });
        has("packed queries and a dense cache", &|p| {
            matches!((p.queries, p.keys), (Queries::Packed { .. }, Keys::Dense))
        });
        has("packed queries and keys in pages", &|p| {
            matches!((p.queries, p.keys), (Queries::Packed { .. }, Keys::Paged { .. }))
        });
        has("decode with keys in pages", &|p| p.len_q == 1 && matches!(p.keys, Keys::Paged { .. }));
        has(
            "a page of an odd number of keys",
            &|p| matches!(p.keys, Keys::Paged { page, .. } if page % 2 == 1),
        );
        has("a head_dim that is no multiple of 8", &|p| p.head_dim % 8 != 0);
        has("the largest head_dim", &|p| p.head_dim == flashcore::MAX_HEAD_DIM);
    }

    #[test]
    fn the_covering_design_meets_every_pair_of_its_values() {
        let pairs: Vec<Case> =
            corpus().into_iter().filter(|case| case.name.starts_with("cover/pairs")).collect();
        assert!(pairs.len() < 100, "{}", pairs.len());
        let met = |with: &dyn Fn(&Case) -> bool| pairs.iter().any(with);
        for dtype in DType::WIDE {
            for arrangement in Arrangement::ALL {
                assert!(met(&|case| case.problem.dtype == dtype && case.arrangement == arrangement));
            }
            for batch in [1, 2, 3, 5] {
                assert!(met(&|case| case.problem.dtype == dtype && case.problem.batch == batch));
            }
        }
        for len_q in [1, 2, 17, 65, 130, 1301] {
            for head_dim in [8, 24, 40, 64, 72, 96, 128, 200] {
                assert!(met(&|case| (case.problem.len_q, case.problem.head_dim) == (len_q, head_dim)));
            }
            for lengths in [false, true] {
                assert!(met(&|case| case.problem.len_q == len_q && case.problem.key_lengths == lengths));
            }
        }
    }

    #[test]
    fn every_element_that_is_no_number_finds_a_place_in_every_dtype() {
        let corpus = corpus();
        for dtype in DType::WIDE {
            for wild in Wild::ALL {
                let quick = corpus.iter().filter(|case| case.tier == Tier::Quick);
                let mut of = quick.filter(|case| case.wild == Some(wild) && case.problem.dtype == dtype);
                assert!(of.any(|case| case.operands().wild.is_some()), "{wild} {dtype}");
            }
        }
    }

    #[test]
    fn the_backward_cases_ask_for_all_that_a_backward_pass_can_be_asked() {
        let backward = corpus_of(Passes::One(Pass::Backward));
        let quick: Vec<&Case> = backward.iter().filter(|case| case.tier == Tier::Quick).collect();
        assert!(quick.len() > 400 && quick.iter().all(|case| case.problem.pass == Pass::Backward));
        for distribution in Distribution::ALL {
            for dtype in DType::WIDE {
                let with = |case: &&Case| case.inputs == distribution && case.problem.dtype == dtype;
                assert!(quick.iter().any(with), "{distribution} {dtype}");
            }
        }
        for with in [
            (|p: &Problem| p.lse) as fn(&Problem) -> bool,
            |p| !p.lse,
            |p| p.softcap.is_some() && p.group() > 1,
            |p| p.key_lengths && p.mask == Mask::Causal,
            |p| p.len_q == 0 && p.len_k > 0,
            |p| p.len_k == 0 && p.len_q > 0,
            |p| p.len_q > p.len_k && p.mask == Mask::Causal,
            |p| p.head_dim_v != p.head_dim,
            |p| p.head_dim == flashcore::MAX_HEAD_DIM,
        ] {
            assert!(quick.iter().any(|case| with(&case.problem)));
        }
        let both = corpus_of(Passes::Both);
        assert_eq!(both.len(), corpus().len() + backward.len());
    }

    #[test]
    fn a_key_length_of_zero_is_in_the_corpus() {
        let zero = |case: &Case| case.key_lengths.as_ref().is_some_and(|lengths| lengths.contains(&0));
        assert!(corpus().iter().any(zero));
    }

    #[test]
    fn windows_read_both_sides() {
        assert_eq!(parse_window("3, 4"), Ok(Mask::Window { left: Some(3), right: Some(4) }));
        assert_eq!(parse_window("inf,0"), Ok(Mask::Window { left: None, right: Some(0) }));
        for wrong in ["3", "3,", "3;4", "-1,2", "a,b"] {
            assert!(parse_window(wrong).unwrap_err().contains("LEFT,RIGHT"));
        }
    }
}
