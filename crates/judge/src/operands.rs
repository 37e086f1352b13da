//! Operands: the inputs of one call in guarded memory, with the options that go with them.

use std::borrow::Cow;
use std::ops::Range;

use flashcore::signature::{PerTensor, Rows};
use flashcore::{
    Append, Attention, Backward, Descales, Device, Keys, Mask, Name, Pages, Pass, Problem, Rotary, Starts,
    Tensor, oracle,
};
use rayon::prelude::*;

use crate::guarded::{Arrangement, Guarded};
use crate::inputs::{Distribution, Values, Wild, draw, draw_descales, draw_gradients};
use crate::placing::{Placing, placed};
use crate::rng::Rng;
use crate::rule::{Row, Yardstick};

/// How many places are tried for an element that is NaN or infinite.
const WILD_TRIES: usize = 64;

/// The inputs of one call.
#[derive(Clone, Debug)]
pub struct Operands {
    /// What is asked.
    pub problem: Problem,
    /// How many keys each batch entry has, if not all of them.
    pub key_lengths: Option<Vec<u32>>,
    /// The queries.
    pub q: Guarded,
    /// The keys.
    pub k: Guarded,
    /// The values.
    pub v: Guarded,
    /// What is read beside them: descales; and by a backward pass o and lse as the oracle has them, rounded, and their
    /// gradients.
    further: PerTensor<Guarded>,
    /// Where one element is NaN or infinite, if one is.
    pub wild: Option<Spot>,
    /// Where the sequences lie when an engine runs, if not as here.
    placing: Option<Placing>,
}

/// One row of an input, and an element of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spot {
    /// An input.
    pub operand: Name,
    /// Batch entry.
    pub batch: usize,
    /// Head: a kv head in k and v, a query head elsewhere.
    pub head: usize,
    /// Query or key.
    pub row: usize,
    /// Element of the row.
    pub column: usize,
}

impl Operands {
    /// Draws inputs for a problem. Keys beyond a key length do not exist, so they are made unreadable.
    pub fn draw(
        problem: Problem,
        key_lengths: Option<Vec<u32>>,
        arrangement: Arrangement,
        distribution: Distribution,
        seed: u64,
    ) -> Self {
        let mut operands = Self::unattended(problem, key_lengths, arrangement, distribution, seed);
        for group in 0..problem.batch * problem.heads_kv {
            operands.attend(group / problem.heads_kv, group % problem.heads_kv);
        }
        operands
    }

    /// The same, where o and lse of a backward pass are what a device makes of the forward one: to time what would take the
    /// oracle long.
    pub fn draw_by(
        device: &Device,
        problem: Problem,
        key_lengths: Option<Vec<u32>>,
        arrangement: Arrangement,
        distribution: Distribution,
        seed: u64,
    ) -> flashcore::Result<Self> {
        let mut operands = Self::unattended(problem, key_lengths, arrangement, distribution, seed);
        if problem.pass == Pass::Backward {
            let (q, k, v) = (operands.q.view(), operands.k.view(), operands.v.view());
            let out = operands.attention().with_lse().run(device, &q, &k, &v)?;
            for (name, given) in [(Name::O, Some(out.o)), (Name::Lse, out.lse)] {
                let Some(given) = given else { continue };
                let values = given.to_f32();
                let tensor = Guarded::with_values(given.dtype(), arrangement, given.shape(), &values);
                operands.further.set(name, tensor);
            }
        }
        Ok(operands)
    }

    /// What is drawn; o and lse of a backward pass are not yet what follows from it.
    fn unattended(
        problem: Problem,
        key_lengths: Option<Vec<u32>>,
        arrangement: Arrangement,
        distribution: Distribution,
        seed: u64,
    ) -> Self {
        let values = draw(&problem, distribution, seed);
        let mut operands = Self::with_values(problem, key_lengths, arrangement, &values);
        let gradients = draw_gradients(&problem, distribution, seed);
        let descales = draw_descales(&problem, distribution, seed);
        let signature = problem.signature();
        let known = [Name::Q, Name::K, Name::V];
        for of in signature.inputs().filter(|of| !known.contains(&of.name)) {
            let tensor = match gradients.get(of.name).or(descales.get(of.name)) {
                Some(values) => Guarded::with_values(of.dtype, arrangement, of.shape, values),
                None => Guarded::new(of.dtype, arrangement, of.shape),
            };
            operands.further.set(of.name, tensor);
        }
        operands
    }

    /// With sequences that lie as a placing says whenever an engine runs. Rows before a sequence's queries become zeros.
    pub fn with_placing(mut self, placing: Placing) -> Self {
        for name in [Name::Q, Name::Do, Name::Dlse] {
            let tensor = match name {
                Name::Q => &mut self.q,
                _ => match self.further.get_mut(name) {
                    Some(tensor) => tensor,
                    None => continue,
                },
            };
            let [batch, heads, _, width] = tensor.shape();
            let mut view = tensor.view_mut();
            for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                for s in 0..placing.padding(b) {
                    view.write_row(b, h, s, &vec![0.0; width]);
                }
            }
        }
        for group in 0..self.problem.batch * self.problem.heads_kv {
            self.attend(group / self.problem.heads_kv, group % self.problem.heads_kv);
        }
        Self { placing: Some(placing), ..self }
    }

    /// Where the sequences lie when an engine runs, if not as here.
    pub fn placing(&self) -> Option<&Placing> {
        self.placing.as_ref()
    }

    /// The inputs as an engine gets them.
    pub fn placed(&self) -> Cow<'_, Self> {
        let Some(placing) = &self.placing else { return Cow::Borrowed(self) };
        let tensors = placed(placing, |name| self.operand(name));
        let [q, k, v] = [Name::Q, Name::K, Name::V].map(|name| tensors[name].clone());
        Cow::Owned(Self {
            problem: placing.problem,
            key_lengths: placing.problem.key_lengths.then(|| placing.before()),
            q,
            k,
            v,
            further: tensors,
            wild: self.wild,
            placing: None,
        })
    }

    /// What `placed` inputs are to be after a run: as they were, but for caches that were appended to.
    pub fn expected(&self, placed: &Self) -> Self {
        let mut expected = placed.clone();
        if let Some(placing) = &self.placing {
            for of in placing.problem.signature().changed() {
                *expected.operand_mut(of.name) = placing.put(of, self.operand(of.name));
            }
        }
        expected
    }

    /// What a call appends, if it does.
    pub fn appended<T>(&self, work: impl FnOnce(&Append<'_>) -> T) -> Option<T> {
        let append = self.problem.append?;
        let view = |name: Name| self.further.get(name).map(Guarded::view);
        let [k, v] = [Name::NewK, Name::NewV].map(|name| self.further[name].view());
        let mut new = Append::new(&k, &v);
        let starts = view(Name::NewStarts);
        if let Some(starts) = &starts {
            new = new.packed(Starts::of(starts, append.len));
        }
        let positions = view(Name::Positions);
        let tables = [view(Name::Cos), view(Name::Sin)];
        if let (Some(turning), [Some(cos), Some(sin)]) = (append.rotary, &tables) {
            let rotary = Rotary::new(cos, sin);
            let rotary = if turning.interleaved { rotary.interleaved() } else { rotary };
            new = new.rotary(positions.as_ref().map_or(rotary, |positions| rotary.positions(positions)));
        }
        Some(work(&new))
    }

    /// Whether a row is of a sequence.
    pub fn has(&self, row: &Row) -> bool {
        self.placing.as_ref().is_none_or(|placing| placing.has(row))
    }

    /// Makes o and lse of a kv head's queries what they are for q, k and v, where they are inputs.
    fn attend(&mut self, batch: usize, head_kv: usize) {
        if self.problem.pass == Pass::Forward {
            return;
        }
        let (problem, lengths) = self.group_problem(batch);
        let part = |name| self.group_part(name, batch, head_kv);
        let truth =
            oracle::attention(&problem, &part(Name::Q), &part(Name::K), &part(Name::V), lengths.as_deref());
        for (name, values) in [(Name::O, truth.o), (Name::Lse, truth.lse)] {
            let Some(tensor) = self.further.get_mut(name) else { continue };
            let values: Vec<f32> = values.into_iter().map(|x| x as f32).collect();
            let ([.., len, width], group) = (tensor.shape(), problem.heads_q);
            let mut view = tensor.view_mut();
            for (i, row) in values.chunks_exact(width).enumerate() {
                view.write_row(batch, head_kv * group + i / len, i % len, row);
            }
        }
    }

    /// The problem of one kv head with its query heads, and its key length.
    fn group_problem(&self, batch: usize) -> (Problem, Option<Vec<u32>>) {
        let mut problem = self.problem.with_kv(1, self.problem.len_k);
        (problem.batch, problem.heads_q) = (1, self.problem.group());
        (problem, self.key_lengths.as_ref().map(|lengths| vec![lengths[batch]]))
    }

    /// What an input holds of one kv head and its query heads.
    fn group_part(&self, name: Name, batch: usize, head_kv: usize) -> Tensor<'_> {
        let (tensor, group) = (self.operand(name), self.problem.group());
        let heads = if matches!(name, Name::K | Name::V) { 1 } else { group };
        tensor.part(batch, 1, head_kv * heads, heads, 0, tensor.shape()[2])
    }

    /// What a backward pass reads, from a view of each input.
    fn backward<'t>(&self, view: impl Fn(Name) -> Tensor<'t>) -> Backward<'t> {
        let [q, k, v, o, lse, d_o] = [Name::Q, Name::K, Name::V, Name::O, Name::Lse, Name::Do].map(&view);
        let given = Backward::new([&q, &k, &v], &o, &lse, &d_o);
        if self.problem.lse { given.with_dlse(&view(Name::Dlse)) } else { given }
    }

    /// What a backward pass reads.
    pub fn given(&self) -> Backward<'_> {
        self.backward(|name| self.operand(name).view())
    }

    /// Runs the problem's pass on a device, for what there is to be said of that; the results are dropped.
    pub fn run_on(&self, device: &Device) -> flashcore::Result<()> {
        let attention = self.attention();
        if self.problem.pass == Pass::Backward {
            return attention.backward(device, &self.given()).map(|_| ());
        }
        let attention = if self.problem.lse { attention.with_lse() } else { attention };
        let [mut k, mut v] = [&self.k, &self.v].map(Clone::clone);
        let appended = self.appended(|new| {
            attention.append(device, new, &self.q.view(), &mut k.view_mut(), &mut v.view_mut()).map(|_| ())
        });
        if let Some(appended) = appended {
            return appended;
        }
        attention.run(device, &self.q.view(), &self.k.view(), &self.v.view()).map(|_| ())
    }

    /// Puts given values into guarded memory.
    pub fn with_values(
        problem: Problem,
        key_lengths: Option<Vec<u32>>,
        arrangement: Arrangement,
        values: &Values,
    ) -> Self {
        let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, dtype, .. } = problem;
        let tensor = |dtype, heads, len, width, values: &[f32]| {
            Guarded::with_values(dtype, arrangement, [batch, heads, len, width], values)
        };
        let dtype_kv = problem.dtype_kv();
        let mut operands = Self {
            problem,
            key_lengths,
            q: tensor(dtype, heads_q, len_q, head_dim, &values.q),
            k: tensor(dtype_kv, heads_kv, len_k, head_dim, &values.k),
            v: tensor(dtype_kv, heads_kv, len_k, head_dim_v, &values.v),
            further: PerTensor::default(),
            wild: None,
            placing: None,
        };
        for b in 0..batch {
            for s in operands.keys(b)..len_k {
                for h in 0..heads_kv {
                    operands.k.spoil_row(b, h, s);
                    operands.v.spoil_row(b, h, s);
                }
            }
        }
        operands
    }

    /// The descales.
    pub fn descales(&self) -> Descales<'_> {
        let all = self.descales_of(|tensor| tensor.view());
        self.problem.descale_keys.map_or(all, |keys| all.per_block(keys))
    }

    /// The descales, from a view of each.
    fn descales_of<'t>(&'t self, view: impl Fn(&'t Guarded) -> Tensor<'t>) -> Descales<'t> {
        let given = Name::DESCALES.map(|name| self.further.get(name).map(&view));
        Descales::some_of(given.each_ref().map(Option::as_ref))
    }

    /// How many keys batch entry `b` has.
    pub fn keys(&self, b: usize) -> usize {
        self.key_lengths.as_ref().map_or(self.problem.len_k, |lengths| lengths[b] as usize)
    }

    /// Puts one NaN or infinity where it reaches some query, and remembers the place. Leaves the operands unchanged
    /// where no query sees two keys.
    pub fn with_wild(mut self, wild: Wild, seed: u64) -> Self {
        let mut rng = Rng::stream(seed, 200);
        let value = if wild.is_nan() { f32::NAN } else { f32::INFINITY.copysign(rng.sign() as f32) };
        let group = self.problem.group();
        for _ in 0..WILD_TRIES {
            let Some((reader, keys)) = self.reader(&mut rng, 2) else { break };
            // Never the first key that a query sees: then every query that sees it sees a finite key too.
            let key = keys.start + 1 + rng.below(keys.len() - 1);
            let (head, row) = match wild.operand() {
                Name::Q => (reader.head, reader.position),
                _ => (reader.head / group, key),
            };
            let width = self.operand(wild.operand()).shape()[3];
            let spot =
                Spot { operand: wild.operand(), batch: reader.batch, head, row, column: rng.below(width) };
            // An infinite query must score +∞ somewhere: where all scores are −∞, a query attends to nothing.
            let meets =
                |key: usize| self.row(Name::K, reader.batch, reader.head / group, key)[spot.column] * value;
            if wild == Wild::InfinityInQ && !keys.clone().any(|key| meets(key) == f32::INFINITY) {
                continue;
            }
            let mut elements = self.row(spot.operand, spot.batch, head, row);
            elements[spot.column] = value;
            self.operand_mut(spot.operand).view_mut().write_row(spot.batch, head, row, &elements);
            self.wild = Some(spot);
            break;
        }
        self
    }

    /// A random query that sees at least `least` keys, with the keys that it sees.
    pub fn reader(&self, rng: &mut Rng, least: usize) -> Option<(Row, Range<usize>)> {
        let Problem { batch, heads_q, len_q, mask, .. } = self.problem;
        let keys = |b: usize, query: usize| mask.keys(query, len_q, self.keys(b));
        let sees =
            |b: usize, query: usize| keys(b, query).len() >= least && self.has(&Row::query(b, 0, query));
        let batches: Vec<usize> = (0..batch).filter(|&b| (0..len_q).any(|query| sees(b, query))).collect();
        if batches.is_empty() || heads_q == 0 {
            return None;
        }
        let (b, head) = (rng.pick(&batches), rng.below(heads_q));
        let queries: Vec<usize> = (0..len_q).filter(|&query| sees(b, query)).collect();
        let query = rng.pick(&queries);
        Some((Row::query(b, head, query), keys(b, query)))
    }

    /// Whether a row of an output depends on a row of an input. A key's depends on what the queries that see it do.
    pub fn depends(&self, row: &Row, spot: &Spot) -> bool {
        let &Row { kind, batch, head, position } = row;
        let Problem { mask, len_q, .. } = self.problem;
        let group = self.problem.group();
        if kind == Rows::Keys {
            let own = Spot { operand: Name::K, batch, head, row: position, column: 0 };
            return (head * group..(head + 1) * group).any(|head| {
                let mut readers = (0..len_q).map(|query| Row::query(batch, head, query));
                readers.any(|reader| self.depends(&reader, &own) && self.depends(&reader, spot))
            });
        }
        self.has(row)
            && batch == spot.batch
            && match spot.operand {
                Name::K | Name::V => {
                    head / group == spot.head
                        && mask.keys(position, len_q, self.keys(batch)).contains(&spot.row)
                }
                Name::QDescale => head / group == spot.head,
                Name::KDescale | Name::VDescale => {
                    let mut keys = mask.keys(position, len_q, self.keys(batch));
                    head / group == spot.head && keys.any(|key| self.problem.descale_block(key) == spot.row)
                }
                _ => head == spot.head && position == spot.row,
            }
    }

    /// A key that a query attends to, drawn by its own weights from the keys that it sees.
    pub fn attended(&self, reader: &Row, keys: Range<usize>, rng: &mut Rng) -> usize {
        let problem = &self.problem;
        let query = self.row(Name::Q, reader.batch, reader.head, reader.position);
        let (descales, kv_head) = (self.descales(), reader.head / problem.group());
        let score = |key: usize| {
            let [of_q, of_k, _] =
                descales.at(reader.batch, kv_head, problem.descale_block(key)).map(f64::from);
            let key = self.row(Name::K, reader.batch, reader.head / problem.group(), key);
            let dot: f64 = query.iter().zip(key).map(|(&a, b)| f64::from(a) * f64::from(b)).sum();
            let score = dot * f64::from(problem.scale) * of_q * of_k;
            problem.softcap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
        };
        let scores: Vec<f64> = keys.clone().map(score).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights = scores.iter().map(|score| (score - most).exp());
        let mut left = rng.unit() * weights.clone().sum::<f64>();
        let drawn = weights.into_iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        keys.start + drawn.unwrap_or(0)
    }

    /// A changed copy of one row: half of its elements, at least one, get the other sign and a smaller magnitude. The
    /// others stay, so that an engine cannot look at a few elements of every row to recognise inputs and reuse a result.
    /// A descale stays positive.
    pub fn redrawn(&self, spot: &Spot, rng: &mut Rng) -> Vec<f32> {
        let mut row = self.row(spot.operand, spot.batch, spot.head, spot.row);
        if Name::DESCALES.contains(&spot.operand) {
            return row.into_iter().map(|x| x * rng.range(0.3, 0.6) as f32).collect();
        }
        let surely = rng.below(row.len());
        for (i, x) in row.iter_mut().enumerate() {
            if rng.chance(0.5) || i == surely {
                *x *= rng.range(-1.0, -0.5) as f32;
            }
        }
        row
    }

    /// Elements of an output that are larger than every value of their head, or not finite: how many, and the first
    /// one's row.
    pub fn beyond_values(&self, o: &Guarded) -> Option<(usize, Row)> {
        let Problem { heads_q, heads_kv, len_q, len_k, head_dim_v, .. } = self.problem;
        let descales = self.descales();
        // An average of numbers whose weights were rounded may be beyond the largest, but not by much.
        let beyond = if self.problem.dtype.is_f8() { 0.07 } else { 8.0 * self.problem.dtype.epsilon() };
        let signature = self.problem.signature();
        let group = self.problem.group();
        // Values beyond a key length are NaN, which a maximum ignores.
        let largest: Vec<f32> = self
            .v
            .values()
            .chunks((len_k * head_dim_v).max(1))
            .enumerate()
            .map(|(i, head)| {
                let value = |(key, value): (usize, &[f32])| {
                    let block = self.problem.descale_block(key);
                    let [.., descale] = descales.at(i / heads_kv, i % heads_kv, block);
                    descale * value.iter().fold(0.0_f32, |most, x| most.max(x.abs()))
                };
                head.chunks_exact(head_dim_v).enumerate().map(value).fold(0.0, f32::max)
            })
            .collect();
        let is_beyond = |(i, x): &(usize, f32)| {
            let head = i / (len_q * head_dim_v);
            let of = head / heads_q * heads_kv + head % heads_q / group;
            let most = largest.get(of).copied().unwrap_or(0.0);
            x.is_nan() || x.abs() > most * (1.0 + beyond)
        };
        let mut all = o.values().into_iter().enumerate().filter(is_beyond);
        let (first, _) = all.next()?;
        let of = signature.outputs().find(|output| output.name == Name::O)?;
        Some((1 + all.count(), Row::of(of, first / head_dim_v)))
    }

    /// An input.
    pub fn operand(&self, name: Name) -> &Guarded {
        match name {
            Name::Q => &self.q,
            Name::K => &self.k,
            Name::V => &self.v,
            other => &self.further[other],
        }
    }

    /// An input, to be changed.
    pub fn operand_mut(&mut self, name: Name) -> &mut Guarded {
        match name {
            Name::Q => &mut self.q,
            Name::K => &mut self.k,
            Name::V => &mut self.v,
            other => {
                self.further.get_mut(other).unwrap_or_else(|| panic!("the problem has no input {other}"))
            }
        }
    }

    /// Writes one row of an input. What a backward pass was given of the forward pass follows.
    pub fn write_row(&mut self, spot: &Spot, elements: &[f32]) {
        self.operand_mut(spot.operand).view_mut().write_row(spot.batch, spot.head, spot.row, elements);
        match spot.operand {
            Name::Q => self.attend(spot.batch, spot.head / self.problem.group()),
            Name::K | Name::V => self.attend(spot.batch, spot.head),
            _ => {}
        }
    }

    /// One row of an input.
    pub fn row(&self, operand: Name, b: usize, head: usize, row: usize) -> Vec<f32> {
        let tensor = self.operand(operand);
        let mut elements = vec![0.0; tensor.shape()[3]];
        tensor.view().read_row(b, head, row, &mut elements);
        elements
    }

    /// The public call with this problem's options.
    pub fn attention(&self) -> Attention<'_> {
        let attention = Attention::new().mask(self.problem.mask).scale(self.problem.scale);
        let attention = attention.softcap(self.problem.softcap.unwrap_or(0.0)).descales(self.descales());
        let mut attention = attention.output(self.problem.out());
        let Problem { len_q, len_k, .. } = self.problem;
        if let Some(starts) = self.further.get(Name::QStarts) {
            attention = attention.packed_queries(Starts::of(&starts.view(), len_q));
        }
        if let Some(starts) = self.further.get(Name::KStarts) {
            let apart = matches!(self.problem.keys, Keys::Apart { .. });
            let of = if apart { Starts::apart } else { Starts::of };
            attention = attention.packed_keys(of(&starts.view(), len_k));
        }
        if let Some(table) = self.further.get(Name::Pages) {
            attention = attention.paged(Pages::new(&table.view()).with_most_keys(len_k));
        }
        match &self.key_lengths {
            Some(lengths) => attention.key_lengths(lengths),
            None => attention,
        }
    }

    /// The yardstick of all rows.
    pub fn yardstick(&self) -> Yardstick {
        let (problem, lengths) = (&self.problem, self.key_lengths.as_deref());
        let all = match problem.pass {
            Pass::Forward => {
                let inputs = [&self.q.view(), &self.k.view(), &self.v.view()];
                Yardstick::descaled(problem, inputs, lengths, &self.descales())
            }
            Pass::Backward => Yardstick::backward(problem, &self.given(), lengths),
        };
        if self.placing.is_some() { all.of_rows(|row| self.has(row)) } else { all }
    }

    /// The yardstick of the gradients of one kv head and its query heads.
    pub fn yardstick_of_group(&self, batch: usize, head_kv: usize) -> Yardstick {
        let (problem, lengths) = self.group_problem(batch);
        let given = self.backward(|name| self.group_part(name, batch, head_kv));
        let first = Row::query(batch, head_kv * self.problem.group(), 0);
        let first_key = Row { kind: Rows::Keys, head: head_kv, ..first };
        Yardstick::backward(&problem, &given, lengths.as_deref())
            .at(first)
            .at(first_key)
            .of_rows(|row| self.has(row))
    }

    /// The yardstick of chosen rows of o, or of the gradient of q, for problems too large to judge whole.
    pub fn yardstick_of_rows(&self, rows: &[Row]) -> Yardstick {
        let one = |row: &Row| {
            let &Row { batch, head, position: query, .. } = row;
            let seen = self.problem.mask.keys(query, self.problem.len_q, self.keys(batch));
            let kv_head = head / self.problem.group();
            // From the first key of a block with descales of its own.
            let block = self.problem.descale_block(seen.start);
            let keys = self.problem.descale_keys.map_or(seen.start, |keys| block * keys)..seen.end;
            let mask = if keys == seen {
                Mask::None
            } else {
                Mask::Window { left: Some(seen.len().saturating_sub(1)), right: None }
            };
            let mut problem = self.problem.with_kv(1, keys.len()).with_mask(mask);
            (problem.batch, problem.heads_q, problem.len_q, problem.key_lengths) = (1, 1, 1, false);
            let q = self.q.part(batch, 1, head, 1, query, 1);
            let k = self.k.part(batch, 1, kv_head, 1, keys.start, keys.len());
            let v = self.v.part(batch, 1, kv_head, 1, keys.start, keys.len());
            if problem.pass == Pass::Backward {
                let d_o = self.operand(Name::Do).part(batch, 1, head, 1, query, 1);
                return Yardstick::gradient_of_query(&problem, [&q, &k, &v], &d_o).at(*row);
            }
            let descales = self.descales_of(|tensor| match tensor.shape()[2] {
                1 => tensor.part(batch, 1, kv_head, 1, 0, 1),
                _ => tensor.part(
                    batch,
                    1,
                    kv_head,
                    1,
                    block,
                    problem.descale_block(keys.len().saturating_sub(1)) + 1,
                ),
            });
            Yardstick::descaled(&problem, [&q, &k, &v], None, &descales).at(*row)
        };
        let parts: Vec<Yardstick> = rows.par_iter().map(one).collect();
        Yardstick::join(parts).unwrap_or_else(|| {
            let mut nothing = self.problem;
            nothing.batch = 0;
            let Problem { len_q, len_k, heads_q, heads_kv, .. } = nothing;
            let q = self.q.part(0, 0, 0, heads_q, 0, len_q);
            let k = self.k.part(0, 0, 0, heads_kv, 0, len_k);
            let v = self.v.part(0, 0, 0, heads_kv, 0, len_k);
            Yardstick::new(&nothing, &q, &k, &v, None)
        })
    }

    /// Up to `most` rows spread over all heads: the first and the last query of every head where there is room,
    /// and random ones between.
    pub fn sample_rows(&self, most: usize, seed: u64) -> Vec<Row> {
        let mut rows = sample_rows(&self.problem, most, seed);
        rows.retain(|row| self.has(row));
        rows
    }
}

/// Up to `most` rows of a problem, spread as [`Operands::sample_rows`] says.
pub fn sample_rows(problem: &Problem, most: usize, seed: u64) -> Vec<Row> {
    let Problem { batch, heads_q, len_q, .. } = *problem;
    let heads = batch * heads_q;
    let mut rows = Vec::new();
    let mut rng = Rng::new(seed);
    if heads * len_q == 0 {
        return rows;
    }
    let every = (most / heads).clamp(1, len_q);
    for head in 0..heads {
        let mut queries: Vec<usize> = match every {
            _ if every == len_q => (0..len_q).collect(),
            1 => vec![rng.below(len_q)],
            _ => [0, len_q - 1].into_iter().chain((2..every).map(|_| rng.below(len_q))).collect(),
        };
        queries.sort_unstable();
        queries.dedup();
        let row = |query| Row::query(head / heads_q, head % heads_q, query);
        rows.extend(queries.into_iter().map(row));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::DType;

    fn operands() -> Operands {
        let problem = Problem::new(2, 4, 9, 8, DType::F16).with_kv(2, 13).with_mask(Mask::Causal);
        let problem = problem.with_key_lengths().with_head_dim_v(6).with_softcap(5.0).with_lse();
        Operands::draw(problem, Some(vec![13, 7]), Arrangement::Padded, Distribution::Normal, 3)
    }

    /// The whole yardstick's truth for chosen rows.
    fn truth(all: &Yardstick, rows: &[Row]) -> (Vec<f64>, Vec<f64>) {
        let (o, lse) = (all.of(Name::O), all.of(Name::Lse));
        let index = |row: &Row| o.rows().iter().position(|r| r == row).unwrap();
        let of = |row: &Row| o.truth()[o.elements(index(row))].to_vec();
        (rows.iter().flat_map(of).collect(), rows.iter().map(|row| lse.truth()[index(row)]).collect())
    }

    #[test]
    fn single_rows_have_the_truth_of_the_whole() {
        let operands = operands();
        let all = operands.yardstick();
        let rows = operands.sample_rows(40, 1);
        let sampled = operands.yardstick_of_rows(&rows);
        let [o, lse] = sampled.measures() else { panic!("two outputs") };
        assert_eq!((o.rows(), lse.rows()), (&rows[..], &rows[..]));
        assert_eq!(truth(&all, &rows), (o.truth().to_vec(), lse.truth().to_vec()));
    }

    #[test]
    fn sampled_rows_cover_every_head_with_its_first_and_last_query() {
        let rows = operands().sample_rows(40, 1);
        assert!(rows.len() <= 40);
        for batch in 0..2 {
            for head in 0..4 {
                for query in [0, 8] {
                    assert!(rows.contains(&Row::query(batch, head, query)), "{batch} {head} {query}");
                }
            }
        }
        assert_eq!(operands().sample_rows(10_000, 1).len(), 2 * 4 * 9);
    }

    #[test]
    fn keys_behind_a_key_length_are_unreadable_and_the_truth_does_not_need_them() {
        let operands = operands();
        let mut row = [0.0; 8];
        operands.k.view().read_row(1, 0, 7, &mut row);
        assert!(row.iter().all(|x| x.is_nan()));
        assert!(operands.yardstick().of(Name::O).truth().iter().all(|x| x.is_finite()));
    }

    #[test]
    fn an_element_that_is_no_number_reaches_the_truth_of_whom_it_concerns() {
        for wild in Wild::ALL {
            // A softcap would make an infinite score finite.
            let problem = Problem::new(2, 4, 9, 8, DType::F16).with_kv(2, 13).with_mask(Mask::Causal);
            let problem = problem.with_key_lengths().with_head_dim_v(6);
            let operands =
                Operands::draw(problem, Some(vec![13, 7]), Arrangement::Padded, Distribution::Normal, 3);
            let operands = operands.with_wild(wild, 5);
            let spot = operands.wild.unwrap();
            assert!(!operands.row(spot.operand, spot.batch, spot.head, spot.row)[spot.column].is_finite());
            let yardstick = operands.yardstick();
            let truth = yardstick.of(Name::O);
            let spoilt = |i: usize| truth.truth()[truth.elements(i)].iter().any(|x| !x.is_finite());
            let reached = |i: &usize| spoilt(*i) && operands.depends(&truth.rows()[*i], &spot);
            assert!((0..truth.rows().len()).any(|i| reached(&i)), "{wild}");
            assert!((0..truth.rows().len()).all(|i| !spoilt(i) || reached(&i)), "{wild}");
            assert!((0..truth.rows().len()).any(|i| !spoilt(i)), "{wild}");
        }
    }

    #[test]
    fn a_key_s_row_depends_on_what_the_queries_that_see_the_key_depend_on() {
        // Query i of 9 sees the keys up to i + 4 of 13 in batch entry 0, and up to i - 2 of 7 in entry 1.
        let operands = operands();
        let depends = |batch: usize, key: usize, operand: Name, head: usize, row: usize| {
            let of = Row { kind: Rows::Keys, ..Row::query(batch, 1, key) };
            operands.depends(&of, &Spot { operand, batch, head, row, column: 0 })
        };
        assert!(
            depends(0, 6, Name::Q, 2, 2) && depends(0, 6, Name::Q, 3, 8),
            "both query heads of the group"
        );
        assert!(!depends(0, 6, Name::Q, 2, 1), "a query that does not see the key");
        assert!(!depends(0, 6, Name::Q, 1, 8), "a query head of the other group");
        assert!(
            depends(0, 6, Name::K, 1, 12) && depends(0, 12, Name::V, 1, 6),
            "keys that a query sees beside it"
        );
        assert!(!depends(0, 6, Name::V, 0, 6) && !depends(1, 6, Name::K, 1, 7));
        assert!(depends(1, 6, Name::Q, 2, 8) && !depends(1, 6, Name::Q, 2, 7));
    }

    #[test]
    fn the_yardstick_of_a_kv_head_has_the_truth_of_the_whole() {
        let problem = operands().problem.backward();
        let operands =
            Operands::draw(problem, Some(vec![13, 7]), Arrangement::Padded, Distribution::Normal, 3);
        let (all, one) = (operands.yardstick(), operands.yardstick_of_group(1, 1));
        assert_eq!(all.measures().len(), 3);
        for (all, one) in all.measures().iter().zip(one.measures()) {
            assert!(!one.rows().is_empty() && one.truth().iter().any(|&x| x != 0.0));
            for (i, row) in one.rows().iter().enumerate() {
                let at = all.rows().iter().position(|other| other == row).unwrap();
                assert_eq!(one.truth()[one.elements(i)], all.truth()[all.elements(at)], "{row}");
            }
        }
    }

    #[test]
    fn o_and_lse_of_a_backward_pass_follow_what_is_changed() {
        let problem = Problem::new(2, 4, 5, 8, DType::F16).with_kv(2, 6).with_mask(Mask::Causal).backward();
        let mut operands = Operands::draw(problem, None, Arrangement::Bshd, Distribution::Normal, 3);
        let before = operands.clone();
        let spot = Spot { operand: Name::K, batch: 1, head: 1, row: 3, column: 0 };
        operands.write_row(&spot, &[0.5; 8]);
        for name in [Name::O, Name::Lse] {
            let changed = operands.operand(name).differences(before.operand(name));
            let expected = |i: usize| operands.depends(&Row::query(i / 20, i / 5 % 4, i % 5), &spot);
            assert!((0..40).all(|i| (changed[i] > 0) == expected(i)), "{name} {changed:?}");
        }
    }

    #[test]
    fn no_rows_make_a_yardstick_that_accepts_nothing_but_nothing() {
        let yardstick = operands().yardstick_of_rows(&[]);
        assert!(yardstick.measures().iter().all(|measure| measure.rows().is_empty()));
        assert!(yardstick.judge(&[(Name::O, []), (Name::Lse, [])]).passed());
    }
}
