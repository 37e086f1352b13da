//! The tolerance rule: how wrong an engine's result may be.
//!
//! An engine is compared with the f64 oracle, and may be at most **twice as wrong as plain attention of the same
//! precision** (scores and probabilities rounded to the dtype, as an unfused framework keeps them), by maximum,
//! by RMS, and by row, so that one bad row cannot hide among many. Each output is judged by its own rows, be they of
//! queries or of keys. lse is judged by row alone, and has a floor of its own. Where plain attention overflows (f16
//! scores beyond 65504) it measures nothing; for those rows it keeps its scores in f32.
//!
//! # The floor
//!
//! Twice an error that is zero by luck is zero, and every correct engine would fail: the first row of a causal
//! problem has one key, and plain attention returns its value exactly. So each row has a floor, derived from its
//! [`Conditioning`] rather than guessed. A correct engine keeps scores and sums in f32, and may round its
//! probabilities and its output to the dtype. With ε the dtype's epsilon and ε₃₂ that of f32, to first order:
//!
//! - **luck**, which differs from row to row: rounding the output and the probabilities, ε/2 each, moves a row by
//!   at most `ε·magnitude`; summing head_dim products and n keys in f32 moves it by about
//!   `ε₃₂·(√head_dim·sensitivity + √n·magnitude)` (rounding errors add up like a random walk).
//! - **habit**, which is the same in every row: folding the scale into base 2 and dividing at the end costs a few
//!   roundings in f32, `ε₃₂·(4·magnitude + sensitivity)`, and nothing below the smallest subnormal can be held.
//!
//! A row's floor is luck plus habit. Over many rows luck averages out, so the floors of maximum and RMS take luck
//! divided by √n, where n is the effective number of rows, (Σl²)²/Σl⁴, which is 1 when one row outweighs all
//! others. The floor is small: a row of standard normal inputs may be off by ε times its magnitude, where a dropped
//! tile or a wrong scale is off by a hundred times that; and over a whole head it all but vanishes.
//!
//! # Eight bits
//!
//! With q, k and v of f8, the truth is attention in f64 of the stored numbers times their descales. Plain attention then
//! keeps its scores in the output's dtype, and rounds its probabilities to f8: those relative to the largest of a row, scaled
//! up by 2⁸, which is what every fused kernel does tile by tile. Twice its error is what makes the bound. What is different
//! is the floor, because ε is now 1/8. Of many keys the roundings of probabilities average out, so that luck has
//! `ε/2·spread` instead of `ε·magnitude`, where spread is √Σ(pₖ·vₖ)²; for a single key that is the same. The output is
//! rounded to its own dtype, as before. And tensor cores add products of 8 bits with 14 bits rather than 24: ε₃₂ of the
//! scores becomes 2⁻¹³, and habit has `2⁻¹³·√128·magnitude` for the sums of a tile of keys, which end there: they are cut off,
//! and all rows come out a little too small. That can tip the rounding of the output, by half its ε, in all rows where
//! values are alike, so habit has that too. A kernel whose sums of 14 bits go on over all keys is refused where there are many.
//!
//! Of tensors that become f8 within the call, the truth is attention of the tensors as they were, and plain attention
//! quantises them before anything else, so that its error holds that of quantising.
//!
//! # Gradients
//!
//! Gradients have floors of the same kind, derived in `gradients.rs`. There habit includes what every engine is given
//! rounded: o, from which it takes what a row's gradients have in common, and lse, from which it takes the probabilities.
//!
//! A gradient may be beyond what the dtype holds; the infinity that it is rounded to is then right.
//!
//! # NaN and infinity
//!
//! Where the truth is NaN or infinite because an input is, the result must not be finite either: hiding it is as wrong
//! as spreading it. Where the oracle has NaN, NaN or an infinity is right. Where it has an infinity in o, that infinity
//! is right, and so is NaN, since a probability that was rounded to 0 makes 0·∞. A −∞ in lse must be exactly that.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use flashcore::oracle::{self, GradientReference, Rounding};
use flashcore::signature::{Parameter, Rows};
use flashcore::{Backward, DType, Descales, Name, Pass, Problem, Quantiser, Tensor, TensorBuf};
use serde::{Serialize, Serializer};

use crate::conditioning::{Conditioning, conditioning};
use crate::gradients;
use crate::inputs::{self, smallest_subnormal};

/// One row of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Row {
    /// Whether it is a query's or a key's.
    pub kind: Rows,
    /// Batch entry.
    pub batch: usize,
    /// Head: a query head of queries, a kv head of keys.
    pub head: usize,
    /// Which query or key of the head.
    pub position: usize,
}

impl Row {
    /// A query's.
    pub const fn query(batch: usize, head: usize, position: usize) -> Self {
        Self { kind: Rows::Queries, batch, head, position }
    }

    /// A row of a tensor, by its own kind.
    pub fn of(tensor: &Parameter, index: usize) -> Self {
        let [batch, head, position] = tensor.row(index);
        Self { kind: tensor.rows, batch, head, position }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [one, _] = self.kind.words();
        write!(f, "batch {}, head {}, {one} {}", self.batch, self.head, self.position)
    }
}

impl Serialize for Row {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let [one, _] = self.kind.words();
        serializer.collect_map([("batch", self.batch), ("head", self.head), (one, self.position)])
    }
}

/// An error with what it is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(into = "WrittenBound")]
pub struct Bound {
    /// The engine's error against the oracle.
    pub error: f64,
    /// The error of plain same-precision attention.
    pub plain: f64,
    /// What the rule allows: twice `plain`, and the floor.
    pub allowed: f64,
}

/// A bound as it is serialised: with the floor, so that what is allowed can be recomputed.
#[derive(Serialize)]
struct WrittenBound {
    error: f64,
    plain: f64,
    floor: f64,
    allowed: f64,
}

impl From<Bound> for WrittenBound {
    fn from(Bound { error, plain, allowed }: Bound) -> Self {
        Self { error, plain, floor: allowed - 2.0 * plain, allowed }
    }
}

impl Bound {
    fn new(error: f64, plain: f64, floor: Floor) -> Self {
        Self { error, plain, allowed: 2.0 * plain + floor.luck + floor.habit }
    }

    /// The error as a share of what is allowed; an error of 0 is a share of 0, even where nothing is allowed.
    pub fn share(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.allowed }
    }

    /// Whether the error is within what is allowed. NaN is not.
    pub fn holds(&self) -> bool {
        self.error <= self.allowed
    }
}

/// One element that is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BadElement {
    /// The output that it is of.
    #[serde(flatten, serialize_with = "write_output")]
    pub output: Name,
    /// Its row.
    pub row: Row,
    /// Its column; 0 for lse.
    pub column: usize,
    /// What the oracle says.
    pub expected: f64,
    /// What the engine returned.
    pub actual: f64,
    /// How far it may be off.
    pub allowed: f64,
}

/// Writes which output an element is of: evidence says of a forward pass whether it is lse.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn write_output<S: Serializer>(output: &Name, serializer: S) -> Result<S::Ok, S::Error> {
    match output {
        Name::O | Name::Lse => serializer.collect_map([("lse", *output == Name::Lse)]),
        _ => serializer.collect_map([("output", output.to_string())]),
    }
}

/// What the rule says about one output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// The output.
    #[serde(skip)]
    pub output: Name,
    /// The largest error of any element; absent where only rows have a bound.
    pub max: Option<Bound>,
    /// The root mean square of all errors; absent where only rows have a bound.
    pub rms: Option<Bound>,
    /// The row with the largest error relative to what it is allowed.
    pub row: Bound,
    /// How many rows were judged.
    pub rows: usize,
    /// The rows that exceed their bounds, as indices into the measure's rows.
    #[serde(skip)]
    pub bad_rows: Vec<usize>,
    /// The first element that is wrong, or the worst one when only the maximum or RMS bound is exceeded.
    #[serde(skip)]
    pub first_bad: Option<BadElement>,
}

impl Verdict {
    /// Its bounds with their names.
    pub fn bounds(&self) -> impl Iterator<Item = (&'static str, Bound)> {
        let all = [("max", self.max), ("rms", self.rms), ("row", Some(self.row))];
        all.into_iter().filter_map(|(name, bound)| Some((name, bound?)))
    }

    /// Whether every bound holds.
    pub fn passed(&self) -> bool {
        self.bad_rows.is_empty() && self.bounds().all(|(_, bound)| bound.holds())
    }
}

/// What the rule says about one result: a verdict on each output that was given.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(into = "WrittenJudgement")]
pub struct Judgement {
    /// The verdicts.
    pub outputs: Vec<Verdict>,
}

/// A judgement as it is serialised: the bounds of o, that of lse, and every other output under its name.
#[derive(Serialize)]
struct WrittenJudgement {
    #[serde(flatten)]
    o: Option<Verdict>,
    lse: Option<Bound>,
    #[serde(flatten)]
    others: BTreeMap<String, Verdict>,
    first_bad: Option<BadElement>,
}

impl From<Judgement> for WrittenJudgement {
    fn from(judgement: Judgement) -> Self {
        let first_bad = judgement.first_bad().copied();
        let mut written = Self { o: None, lse: None, others: BTreeMap::new(), first_bad };
        for verdict in judgement.outputs {
            match verdict.output {
                Name::O => written.o = Some(verdict),
                Name::Lse => written.lse = Some(verdict.row),
                other => drop(written.others.insert(other.to_string(), verdict)),
            }
        }
        written
    }
}

impl Judgement {
    /// Of a forward pass, by its bounds: maximum, RMS and row of o, and lse where it was judged.
    pub fn forward(rows: usize, [max, rms, row]: [Bound; 3], lse: Option<Bound>) -> Self {
        let (bad_rows, first_bad) = (Vec::new(), None);
        let o = Verdict { output: Name::O, max: Some(max), rms: Some(rms), row, rows, bad_rows, first_bad };
        let lse = lse.map(|row| Verdict { output: Name::Lse, max: None, rms: None, row, ..o.clone() });
        Self { outputs: [o].into_iter().chain(lse).collect() }
    }

    /// Whether every bound of every output holds.
    pub fn passed(&self) -> bool {
        !self.outputs.is_empty() && self.outputs.iter().all(Verdict::passed)
    }

    /// The bound by maximum of the output that is nearest to it, or furthest beyond.
    pub fn max(&self) -> Bound {
        worst_bound(self.outputs.iter().filter_map(|verdict| verdict.max))
    }

    /// The bound by RMS of the output that is nearest to it, or furthest beyond.
    pub fn rms(&self) -> Bound {
        worst_bound(self.outputs.iter().filter_map(|verdict| verdict.rms))
    }

    /// The largest share of any bound that the result used.
    pub fn share_used(&self) -> f64 {
        self.outputs.iter().flat_map(Verdict::bounds).map(|(_, bound)| bound.share()).fold(0.0, f64::max)
    }

    /// The engine's largest error as a multiple of plain attention's; absent where plain attention is exact.
    pub fn error_ratio(&self) -> Option<f64> {
        let max = self.max();
        (max.plain > 0.0).then(|| max.error / max.plain)
    }

    /// A wrong element of the first output that is wrong.
    pub fn first_bad(&self) -> Option<&BadElement> {
        self.outputs.iter().find_map(|verdict| verdict.first_bad.as_ref())
    }
}

/// What a row may be off by in addition to twice plain attention's error.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Floor {
    pub luck: f64,
    pub habit: f64,
}

/// The truth about some rows of an output, and how far from it a result may be.
#[derive(Clone, Debug)]
pub struct Measure {
    output: Name,
    rows: Vec<Row>,
    width: usize,
    truth: Vec<f64>,
    plain: Vec<f64>,
    floors: Vec<Floor>,
    /// Whether elements are sums of products, as of all outputs but lse: then the whole has bounds too, and NaN may
    /// stand for an infinity, since 0·∞ is NaN.
    sums: bool,
    /// From where on a gradient is rounded to an infinity. Outputs, which are averages, never are.
    overflow: Option<f64>,
}

impl Measure {
    /// For all rows of an output.
    fn new(of: &Parameter, truth: Vec<f64>, mut plain: Vec<f64>, floors: Vec<Floor>) -> Self {
        let [batch, heads, len, width] = of.shape;
        let sums = of.name != Name::Lse;
        // Where plain attention overflows all the same, only the floor is allowed.
        for (plain, truth) in plain.iter_mut().zip(&truth).filter(|_| sums) {
            if !plain.is_finite() && truth.is_finite() {
                *plain = *truth;
            }
        }
        let rows = (0..batch * heads * len).map(|i| Row::of(of, i)).collect();
        let overflow = matches!(of.name, Name::Dq | Name::Dk | Name::Dv)
            .then(|| inputs::largest(of.dtype) * (1.0 + f64::from(of.dtype.epsilon()) / 4.0));
        Self { output: of.name, rows, width, truth, plain, floors, sums, overflow }
    }

    /// The rows that it measures, in the order in which results are given.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The truth.
    pub fn truth(&self) -> &[f64] {
        &self.truth
    }

    /// The elements of one row.
    pub fn elements(&self, row: usize) -> Range<usize> {
        row * self.width..(row + 1) * self.width
    }

    /// The largest error of one row, and what it may be.
    pub fn row_bound(&self, row: usize, got: &[f32]) -> Bound {
        let elements = self.elements(row);
        let error = largest(&self.errors(got, elements.clone()));
        Bound::new(error, largest(&self.errors(&self.plain, elements)), self.floors[row])
    }

    /// What rounding alone may move a row by.
    pub fn row_floor(&self, row: usize) -> f64 {
        self.floors[row].luck + self.floors[row].habit
    }

    fn errors<T: Copy + Into<f64>>(&self, got: &[T], elements: Range<usize>) -> Vec<f64> {
        let pairs = got[elements.clone()].iter().zip(&self.truth[elements]);
        pairs.map(|(&got, &truth)| self.error(got.into(), truth)).collect()
    }

    fn error(&self, got: f64, truth: f64) -> f64 {
        match self.overflow {
            _ if self.sums && truth.is_infinite() && got.is_nan() => 0.0,
            // An infinity stands for whatever is rounded to it.
            Some(least) if got.is_infinite() && truth.is_finite() => (least - truth * got.signum()).max(0.0),
            _ => distance(got, truth),
        }
    }

    fn judge(&self, got: &[f32]) -> Verdict {
        let output = self.output;
        assert_eq!(got.len(), self.truth.len(), "{output} has one element for each of the oracle's");
        let rows: Vec<Bound> = (0..self.rows.len()).map(|row| self.row_bound(row, got)).collect();
        let mut verdict = Verdict {
            output,
            max: self.sums.then(|| self.whole(got, largest)),
            rms: self.sums.then(|| self.whole(got, rms)),
            row: worst_bound(rows.iter().copied()),
            rows: rows.len(),
            bad_rows: (0..rows.len()).filter(|&row| !rows[row].holds()).collect(),
            first_bad: None,
        };
        if !verdict.passed() {
            verdict.first_bad = self.first_bad(&verdict, got, &rows);
        }
        verdict
    }

    /// A bound over all elements at once.
    fn whole(&self, got: &[f32], over: fn(&[f64]) -> f64) -> Bound {
        let all = 0..self.truth.len();
        let floors = |part: fn(&Floor) -> f64| over(&self.floors.iter().map(part).collect::<Vec<_>>());
        let luck = floors(|floor| floor.luck) / self.carriers().sqrt();
        let floor = Floor { luck, habit: floors(|floor| floor.habit) };
        Bound::new(over(&self.errors(got, all.clone())), over(&self.errors(&self.plain, all)), floor)
    }

    /// The effective number of rows for luck: all when they are alike, one when it outweighs the others.
    fn carriers(&self) -> f64 {
        let most = self.floors.iter().map(|floor| floor.luck).fold(0.0, f64::max);
        if most == 0.0 {
            return 1.0;
        }
        let squares = || self.floors.iter().map(|floor| (floor.luck / most).powi(2));
        squares().sum::<f64>().powi(2) / squares().map(|x| x * x).sum::<f64>()
    }

    fn first_bad(&self, verdict: &Verdict, got: &[f32], rows: &[Bound]) -> Option<BadElement> {
        let error = |i: usize| self.error(f64::from(got[i]), self.truth[i]);
        let (at, allowed) = if let Some(&row) = verdict.bad_rows.first() {
            let allowed = rows[row].allowed;
            (self.elements(row).find(|&i| !matches!(error(i), e if e <= allowed))?, allowed)
        } else {
            ((0..got.len()).max_by(|&a, &b| error(a).total_cmp(&error(b)))?, verdict.max?.allowed)
        };
        Some(BadElement {
            output: self.output,
            row: self.rows[at / self.width],
            column: at % self.width,
            expected: self.truth[at],
            actual: f64::from(got[at]),
            allowed,
        })
    }
}

/// The truth about a problem's outputs, and how far from it a result may be: a measure for each of them.
#[derive(Clone, Debug)]
pub struct Yardstick {
    measures: Vec<Measure>,
}

impl Yardstick {
    /// For all rows of a problem's outputs.
    pub fn new(
        problem: &Problem,
        q: &Tensor<'_>,
        k: &Tensor<'_>,
        v: &Tensor<'_>,
        key_lengths: Option<&[u32]>,
    ) -> Self {
        Self::descaled(problem, [q, k, v], key_lengths, &Descales::new())
    }

    /// For all rows of a problem's outputs, of what stored numbers stand for.
    pub fn descaled(
        problem: &Problem,
        inputs: [&Tensor<'_>; 3],
        key_lengths: Option<&[u32]>,
        descales: &Descales<'_>,
    ) -> Self {
        if let Some(quantiser) = problem.quantise {
            return Self::quantised(problem, inputs, key_lengths, quantiser);
        }
        let oracle = oracle::descaled(problem, inputs, key_lengths, descales);
        let plain = |rounding| oracle::same_precision(problem, inputs, key_lengths, descales, rounding);
        let mut rounded = plain(Rounding::ScoresAndProbabilities);
        let unrounded = plain(Rounding::Probabilities);
        take_finite_rows(&mut rounded.o, &unrounded.o, problem.head_dim_v);
        let felt = conditioning(problem, inputs, key_lengths, descales, &oracle);
        let (floors, lse_floors) =
            felt.iter().zip(&oracle.lse).map(|(felt, lse)| floors(problem, felt, *lse)).unzip();
        // lse is summed from scores in f32 by every engine, so its yardstick is the one that does so too.
        let outputs = [(oracle.o, rounded.o, floors), (oracle.lse, unrounded.lse, lse_floors)];
        let signature = problem.signature();
        let measure = |(of, (truth, plain, floors))| Measure::new(of, truth, plain, floors);
        Self { measures: signature.outputs().zip(outputs).map(measure).collect() }
    }

    /// For all rows of a problem whose tensors become f8: the truth is that of the tensors as they were, and plain attention
    /// quantises them first.
    fn quantised(
        problem: &Problem,
        inputs: [&Tensor<'_>; 3],
        key_lengths: Option<&[u32]>,
        quantiser: Quantiser,
    ) -> Self {
        let made = quantiser.quantise(inputs, key_lengths).expect("tensors that lie on the host");
        let stored = [&made.q, &made.k, &made.v].map(TensorBuf::view);
        let descales = made.descales.each_ref().map(TensorBuf::view);
        let descales = Descales::of(descales.each_ref());
        let mut of_stored = Self::descaled(&problem.quantised(), stored.each_ref(), key_lengths, &descales);
        let mut unchanged = *problem;
        unchanged.quantise = None;
        let oracle = oracle::attention(&unchanged, inputs[0], inputs[1], inputs[2], key_lengths);
        let shifts = made.shifts(inputs[0], problem.scale);
        for (measure, truth) in of_stored.measures.iter_mut().zip([oracle.o, oracle.lse]) {
            if let (Name::Lse, Some(shifts)) = (measure.output, &shifts) {
                measure.plain.iter_mut().zip(shifts).for_each(|(lse, shift)| *lse += shift);
            }
            measure.truth = truth;
        }
        of_stored
    }

    /// For all rows of a backward problem's gradients.
    pub fn backward(problem: &Problem, given: &Backward<'_>, key_lengths: Option<&[u32]>) -> Self {
        let oracle = oracle::gradients(problem, given, key_lengths);
        let floors = gradients::floors(problem, given, key_lengths, &oracle);
        let plain = |rounding| {
            let GradientReference { dq, dk, dv } =
                oracle::same_precision_gradients(problem, given, key_lengths, rounding);
            [dq, dk, dv]
        };
        let rounded = plain(Rounding::ScoresAndProbabilities);
        let unrounded = plain(Rounding::Probabilities);
        let signature = problem.signature();
        let mut measures = Vec::new();
        for (of, ((truth, floors), (mut plain, unrounded))) in signature.outputs().zip(
            [oracle.dq, oracle.dk, oracle.dv].into_iter().zip(floors).zip(rounded.into_iter().zip(unrounded)),
        ) {
            take_finite_rows(&mut plain, &unrounded, of.shape[3]);
            measures.push(Measure::new(of, truth, plain, floors));
        }
        Self { measures }
    }

    /// That of the gradient of q in a backward pass of one query and what it sees, which depends on no other query. o and lse
    /// are the oracle's, rounded.
    pub fn gradient_of_query(problem: &Problem, [q, k, v]: [&Tensor<'_>; 3], d_o: &Tensor<'_>) -> Self {
        let forward = problem.with_pass(Pass::Forward).with_lse();
        let truth = oracle::attention(&forward, q, k, v, None);
        let row_of = |values: &[f64], dtype| {
            let narrow: Vec<f32> = values.iter().map(|&x| x as f32).collect();
            TensorBuf::from_f32(&narrow, [1, 1, 1, narrow.len()], dtype).expect("one row")
        };
        let (o, lse) = (row_of(&truth.o, problem.dtype), row_of(&truth.lse, DType::F32));
        let given = Backward::new([q, k, v], &o.view(), &lse.view(), d_o);
        Self::backward(problem, &given, None).only(Name::Dq)
    }

    /// The same rows as part of a larger problem, where those of the kind of `first` begin there.
    pub fn at(mut self, first: Row) -> Self {
        let rows = self.measures.iter_mut().flat_map(|measure| &mut measure.rows);
        for row in rows.filter(|row| row.kind == first.kind) {
            row.batch += first.batch;
            row.head += first.head;
            row.position += first.position;
        }
        self
    }

    /// For some of the rows alone.
    pub fn of_rows(mut self, keep: impl Fn(&Row) -> bool) -> Self {
        for measure in &mut self.measures {
            let kept: Vec<usize> = (0..measure.rows.len()).filter(|&i| keep(&measure.rows[i])).collect();
            let elements =
                |all: &[f64]| kept.iter().flat_map(|&i| all[measure.elements(i)].to_vec()).collect();
            (measure.truth, measure.plain) = (elements(&measure.truth), elements(&measure.plain));
            measure.rows = kept.iter().map(|&i| measure.rows[i]).collect();
            measure.floors = kept.iter().map(|&i| measure.floors[i]).collect();
        }
        self
    }

    /// For one of the outputs alone.
    pub fn only(mut self, output: Name) -> Self {
        self.measures.retain(|measure| measure.output == output);
        self
    }

    /// Several yardsticks as one. Panics unless they have the same outputs, with rows of one width.
    pub fn join(parts: impl IntoIterator<Item = Yardstick>) -> Option<Self> {
        parts.into_iter().reduce(|mut all, part| {
            assert_eq!(all.measures.len(), part.measures.len(), "the same outputs");
            for (all, part) in all.measures.iter_mut().zip(part.measures) {
                assert_eq!((all.output, all.width), (part.output, part.width), "rows of one width");
                all.rows.extend(part.rows);
                all.truth.extend(part.truth);
                all.plain.extend(part.plain);
                all.floors.extend(part.floors);
            }
            all
        })
    }

    /// The measures, in the order of the problem's signature.
    pub fn measures(&self) -> &[Measure] {
        &self.measures
    }

    /// The measure of an output.
    pub fn of(&self, output: Name) -> &Measure {
        let found = self.measures.iter().find(|measure| measure.output == output);
        found.unwrap_or_else(|| panic!("the problem has no output {output}"))
    }

    /// Judges those outputs that are given, each in the order of its measure's rows.
    pub fn judge(&self, given: &[(Name, impl AsRef<[f32]>)]) -> Judgement {
        let verdict = |(output, got): &(Name, _)| self.of(*output).judge(AsRef::as_ref(got));
        Judgement { outputs: given.iter().map(verdict).collect() }
    }
}

/// Replaces the rows that hold an infinity or NaN by others.
fn take_finite_rows(rows: &mut [f64], others: &[f64], width: usize) {
    for (row, other) in rows.chunks_exact_mut(width.max(1)).zip(others.chunks_exact(width.max(1))) {
        if !row.iter().all(|x| x.is_finite()) {
            row.copy_from_slice(other);
        }
    }
}

/// What tensor cores cut off of a sum of products of 8 bits: they keep 14.
const SHORT: f64 = 1.0 / 8192.0;

/// The most keys over which such a sum may go on.
const SHORT_KEYS: f64 = 128.0;

/// The floors of one row of o and of its lse; a row without keys has none, its zeros and −∞ are exact.
fn floors(problem: &Problem, row: &Conditioning, lse: f64) -> (Floor, Floor) {
    if row.keys == 0 {
        return Default::default();
    }
    let epsilon = f64::from(problem.out().epsilon());
    let single = f64::from(f32::EPSILON);
    let (keys, head_dim) = (row.keys as f64, problem.head_dim as f64);
    // One that is not finite is right or wrong, never near.
    let lse = if lse.is_finite() { lse.abs() } else { 0.0 };
    let smallest = smallest_subnormal(problem.out()) + keys * f64::from(f32::from_bits(1));
    let o = Floor {
        luck: epsilon * row.magnitude
            + single * (head_dim.sqrt() * row.sensitivity + keys.sqrt() * row.magnitude),
        habit: single * (4.0 * row.magnitude + row.sensitivity) + smallest,
    };
    let lse = single * ((head_dim.sqrt() + 4.0) * row.score_magnitude + 4.0 + keys.sqrt() + lse);
    if problem.dtype.is_f8() {
        let rounded = f64::from(problem.dtype.epsilon()) / 2.0 * row.spread;
        let (of_scores, of_sums) = (SHORT * head_dim.sqrt(), SHORT * SHORT_KEYS.sqrt());
        let luck = o.luck + rounded + of_scores * row.sensitivity;
        let habit = o.habit + (of_sums + epsilon / 2.0) * row.magnitude;
        return (Floor { luck, habit }, Floor { luck: lse + of_scores * row.score_magnitude, habit: 0.0 });
    }
    (o, Floor { luck: lse, habit: 0.0 })
}

/// The distance of two values; 0 for the same infinity, and for anything not finite where the truth is NaN. Infinite
/// where only one is finite.
fn distance(got: f64, truth: f64) -> f64 {
    if got == truth || truth.is_nan() && !got.is_finite() {
        return 0.0;
    }
    let distance = (got - truth).abs();
    if distance.is_nan() { f64::INFINITY } else { distance }
}

fn largest(errors: &[f64]) -> f64 {
    errors.iter().copied().fold(0.0, f64::max)
}

/// Root mean square, free of overflow and underflow at the dtypes' extremes.
fn rms(errors: &[f64]) -> f64 {
    let most = largest(errors);
    if most == 0.0 || most.is_infinite() {
        return most;
    }
    let sum: f64 = errors.iter().map(|x| (x / most).powi(2)).sum();
    most * (sum / errors.len() as f64).sqrt()
}

/// The bound that is most exceeded, or nearest to it.
fn worst_bound(bounds: impl Iterator<Item = Bound>) -> Bound {
    let worst = bounds.max_by(|a, b| a.share().total_cmp(&b.share()));
    worst.unwrap_or(Bound { error: 0.0, plain: 0.0, allowed: 0.0 })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::guarded::Arrangement;
    use crate::inputs::Distribution;
    use crate::operands::Operands;
    use flashcore::{DType, Mask};

    fn yardstick(problem: Problem, inputs: Distribution) -> Yardstick {
        Operands::draw(problem, None, Arrangement::Bhsd, inputs, 8).yardstick()
    }

    /// The truth, rounded to a dtype: what the best engine returns.
    fn best(yardstick: &Yardstick, dtype: DType) -> Vec<f32> {
        yardstick.of(Name::O).truth.iter().map(|&x| dtype.round(x as f32)).collect()
    }

    /// The truth about an output in f16.
    fn best_of(yardstick: &Yardstick, output: Name) -> Vec<f32> {
        yardstick.of(output).truth.iter().map(|&x| DType::F16.round(x as f32)).collect()
    }

    fn judge_o(yardstick: &Yardstick, o: &[f32]) -> Verdict {
        yardstick.judge(&[(Name::O, o)]).outputs.remove(0)
    }

    /// The bad rows of o and of lse.
    fn bad_rows(yardstick: &Yardstick, o: &[f32], lse: &[f32]) -> [Vec<usize>; 2] {
        [(Name::O, o), (Name::Lse, lse)].map(|given| yardstick.judge(&[given]).outputs.remove(0).bad_rows)
    }

    #[test]
    fn the_rounded_truth_is_accepted_on_every_input_and_dtype() {
        for dtype in DType::WIDE {
            for inputs in Distribution::ALL {
                let problem = Problem::new(1, 2, 33, 16, dtype).with_mask(Mask::Causal);
                let yardstick = yardstick(problem, inputs);
                let verdict = judge_o(&yardstick, &best(&yardstick, dtype));
                assert!(verdict.passed(), "{dtype} {inputs}: {verdict:?}");
            }
        }
    }

    #[test]
    fn rounded_gradients_are_accepted_on_every_input_and_dtype_and_others_refused() {
        for dtype in DType::WIDE {
            for inputs in Distribution::ALL {
                let problem = Problem::new(1, 2, 33, 16, dtype).with_kv(1, 40).with_mask(Mask::Causal);
                let yardstick = yardstick(problem.with_lse().backward(), inputs);
                let given = |factor: f64| -> Vec<(Name, Vec<f32>)> {
                    let of =
                        |m: &Measure| m.truth.iter().map(|&x| dtype.round((x * factor) as f32)).collect();
                    yardstick.measures().iter().map(|measure| (measure.output, of(measure))).collect()
                };
                let judgement = yardstick.judge(&given(1.0));
                assert!(judgement.passed(), "{dtype} {inputs}: {judgement:?}");
                // Of scores beyond ten thousand, lse in f32 leaves less than this.
                let vague = [Distribution::OverflowingScores, Distribution::NegativeScores].contains(&inputs);
                let refused = yardstick.judge(&given(1.1));
                assert!(
                    vague || refused.outputs.iter().all(|it| !it.passed()),
                    "{dtype} {inputs}: {refused:?}"
                );
            }
        }
    }

    #[test]
    fn a_gradient_beyond_the_dtype_is_an_infinity_and_no_other_is() {
        let problem = Problem::new(1, 1, 3, 4, DType::F16).backward();
        let mut measure = yardstick(problem, Distribution::Normal).of(Name::Dk).clone();
        (measure.truth[1], measure.plain[1]) = (-7e4, -7e4);
        let bad = |at: usize, value: f32| {
            let mut dk: Vec<f32> = measure.truth.iter().map(|&x| DType::F16.round(x as f32)).collect();
            dk[at] = value;
            measure.judge(&dk).bad_rows
        };
        assert!(bad(1, f32::NEG_INFINITY).is_empty());
        assert_eq!(bad(1, f32::INFINITY), [0]);
        assert_eq!(bad(1, f32::NAN), [0]);
        assert_eq!(bad(6, f32::INFINITY), [1]);
    }

    #[test]
    fn gradients_of_what_nobody_sees_must_be_zeros_exactly() {
        let problem = Problem::new(1, 1, 3, 4, DType::F16).with_kv(1, 2).with_mask(Mask::Causal).backward();
        let yardstick = yardstick(problem, Distribution::Normal);
        let mut dq = best_of(&yardstick, Name::Dq);
        assert_eq!(dq[..4], [0.0; 4]);
        assert!(yardstick.judge(&[(Name::Dq, &dq)]).passed());
        dq[3] = 1e-7;
        assert_eq!(yardstick.judge(&[(Name::Dq, &dq)]).outputs[0].bad_rows, [0]);
    }

    #[test]
    fn an_honest_rounding_is_accepted_where_plain_attention_is_exact_by_luck() {
        // One key: plain attention returns its value, so twice its error is nothing.
        for dtype in DType::WIDE {
            let yardstick = yardstick(Problem::new(1, 1, 1, 16, dtype), Distribution::Normal);
            let exact = best(&yardstick, dtype);
            assert_eq!(judge_o(&yardstick, &exact).row.plain, 0.0);
            let off = |ulps: f32| -> Vec<f32> {
                exact.iter().map(|&x| x + ulps * dtype.epsilon() * x.abs() / 2.0).collect()
            };
            assert!(judge_o(&yardstick, &off(1.0)).passed(), "{dtype}");
            // A value that is off by sixteen roundings is not luck.
            assert!(!judge_o(&yardstick, &off(-16.0)).passed(), "{dtype}");
        }
    }

    #[test]
    fn luck_averages_out_over_many_rows_but_not_over_one_loud_one() {
        let many = yardstick(Problem::new(1, 4, 256, 16, DType::F16), Distribution::Normal);
        let mut loud = many.of(Name::O).clone();
        let carriers = loud.carriers();
        assert!((600.0..=1024.0).contains(&carriers), "{carriers}");
        loud.floors[77].luck *= 1e6;
        assert!((1.0..1.01).contains(&loud.carriers()));
    }

    #[test]
    fn a_bias_that_no_row_shows_is_seen_by_the_whole() {
        // Every output 2 % too large in bf16: within each row's own floor, but in every row.
        let yardstick = yardstick(Problem::new(1, 4, 512, 64, DType::BF16), Distribution::Normal);
        let biased: Vec<f32> =
            yardstick.of(Name::O).truth.iter().map(|&x| DType::BF16.round(x as f32 * 1.02)).collect();
        let verdict = judge_o(&yardstick, &biased);
        assert!(verdict.bad_rows.is_empty() && !verdict.rms.unwrap().holds(), "{verdict:?}");
    }

    #[test]
    fn where_half_precision_scores_overflow_the_yardstick_keeps_them_in_f32() {
        for inputs in [Distribution::OverflowingScores, Distribution::NegativeScores] {
            let yardstick = yardstick(Problem::new(1, 2, 64, 64, DType::F16), inputs);
            assert!(yardstick.of(Name::O).plain.iter().all(|x| x.is_finite()), "{inputs}");
            assert!(judge_o(&yardstick, &best(&yardstick, DType::F16)).passed(), "{inputs}");
            assert!(!judge_o(&yardstick, &vec![0.0; 2 * 64 * 64]).passed(), "{inputs}");
        }
    }

    #[test]
    fn a_row_without_keys_must_be_zeros_and_minus_infinity_exactly() {
        let problem = Problem::new(1, 1, 2, 4, DType::F16).with_kv(1, 1).with_mask(Mask::Causal).with_lse();
        let yardstick = yardstick(problem, Distribution::Normal);
        let (o, lse) = (best(&yardstick, DType::F16), yardstick.of(Name::Lse).truth[1] as f32);
        assert_eq!(bad_rows(&yardstick, &o, &[f32::NEG_INFINITY, lse]), [const { Vec::<usize>::new() }; 2]);
        assert_eq!(bad_rows(&yardstick, &o, &[-1e30, lse]), [vec![], vec![0]]);
        assert_eq!(bad_rows(&yardstick, &o, &[f32::NAN, lse]), [vec![], vec![0]]);
        let mut tiny = o;
        tiny[3] = 1e-30;
        assert_eq!(bad_rows(&yardstick, &tiny, &[f32::NEG_INFINITY, lse]), [vec![0], vec![]]);
    }

    /// A yardstick where one element of an input is NaN or infinite.
    fn with_one_element(operand: usize, at: usize, wild: f32) -> Yardstick {
        let problem = Problem::new(1, 1, 6, 4, DType::F32).with_mask(Mask::Causal).with_lse();
        let mut values = crate::inputs::draw(&problem, Distribution::Normal, 8);
        [&mut values.q, &mut values.k, &mut values.v][operand][at] = wild;
        Operands::with_values(problem, None, Arrangement::Bhsd, &values).yardstick()
    }

    #[test]
    fn a_nan_must_reach_the_rows_that_see_it_and_no_other() {
        for (operand, wild) in [(0, f32::NAN), (1, f32::NAN), (2, f32::NAN), (2, f32::INFINITY)] {
            // Element 1 of row 2: seen by query 2 alone in q, and by queries 2 to 5 in k and v.
            let yardstick = with_one_element(operand, 2 * 4 + 1, wild);
            let o = best(&yardstick, DType::F32);
            let lse: Vec<f32> = yardstick.of(Name::Lse).truth.iter().map(|&x| x as f32).collect();
            let spoilt: Vec<usize> = (0..24).filter(|&i| !o[i].is_finite()).collect();
            let expected: Vec<usize> = match operand {
                0 => (8..12).collect(),
                1 => (8..24).collect(),
                _ => (8..24).filter(|i| i % 4 == 1).collect(),
            };
            assert_eq!(spoilt, expected, "{operand} {wild}");
            assert!(yardstick.judge(&[(Name::O, &o), (Name::Lse, &lse)]).passed(), "{operand} {wild}");
            for i in 0..24 {
                let mut other = o.clone();
                other[i] = if spoilt.contains(&i) { 0.0 } else { f32::NAN };
                assert_eq!(judge_o(&yardstick, &other).bad_rows, [i / 4], "{operand} {wild} at {i}");
                // The finite elements must be right as well.
                if !spoilt.contains(&i) {
                    other[i] = o[i] * 1.001 + 1e-3;
                    assert_eq!(judge_o(&yardstick, &other).bad_rows, [i / 4], "{operand} {wild} at {i}");
                }
            }
        }
    }

    #[test]
    fn an_infinite_key_that_weighs_nothing_leaves_numbers_that_are_judged_as_ever() {
        let yardstick = with_one_element(1, 2 * 4 + 1, f32::INFINITY);
        let o = best(&yardstick, DType::F32);
        let numbers = |row: usize| o[row * 4..][..4].iter().all(|x| x.is_finite());
        let seeing: Vec<bool> = (2..6).map(numbers).collect();
        assert!(seeing.contains(&true) && seeing.contains(&false), "{seeing:?}");
        let verdict = judge_o(&yardstick, &o);
        assert!(verdict.passed() && verdict.row.allowed.is_finite(), "{verdict:?}");
        for row in (2..6).filter(|&row| numbers(row)) {
            let mut other = o.clone();
            other[row * 4] += 1e-3;
            assert_eq!(judge_o(&yardstick, &other).bad_rows, [row]);
        }
    }

    #[test]
    fn the_first_bad_element_is_the_one_that_is_bad() {
        let yardstick = yardstick(Problem::new(2, 3, 5, 8, DType::F32), Distribution::Normal);
        let mut o = best(&yardstick, DType::F32);
        let index = ((3 + 2) * 5 + 4) * 8 + 6;
        o[index] += 0.5;
        let bad = judge_o(&yardstick, &o).first_bad.unwrap();
        assert_eq!((bad.row, bad.column), (Row::query(1, 2, 4), 6));
        assert_eq!((bad.expected, bad.actual), (yardstick.of(Name::O).truth[index], f64::from(o[index])));
    }

    /// A yardstick of made-up outputs with the shapes and names of q, k and v: gradients have such shapes.
    pub(crate) fn like_gradients(problem: &Problem) -> Yardstick {
        let measure = |of: &Parameter| {
            let truth: Vec<f64> = (0..of.shape.iter().product()).map(|i: usize| i as f64).collect();
            let floors = vec![Floor { luck: 0.0, habit: 0.25 }; truth.len() / of.shape[3]];
            Measure::new(of, truth.clone(), truth, floors)
        };
        Yardstick { measures: problem.signature().inputs().map(measure).collect() }
    }

    #[test]
    fn every_output_is_judged_by_its_own_rows_be_they_of_queries_or_of_keys() {
        let one = like_gradients(&"2x4/2x5/7x8/6 f16".parse().unwrap());
        // The same once more, as batch entries 2 and 3 of a larger problem, whose keys begin elsewhere than its queries.
        let next = one.clone().at(Row::query(2, 0, 0)).at(Row { kind: Rows::Keys, ..Row::query(2, 0, 7) });
        let yardstick = Yardstick::join([one, next]).unwrap();
        let result = |measure: &Measure| (measure.output, measure.truth.iter().map(|&x| x as f32).collect());
        let mut given: Vec<(Name, Vec<f32>)> = yardstick.measures().iter().map(result).collect();
        assert!(yardstick.judge(&given).passed());
        // The last element of k, in either half.
        given[1].1[2 * 2 * 7 * 8 - 1] += 1.0;
        given[1].1[2 * 2 * 2 * 7 * 8 - 1] = f32::NAN;
        let judgement = yardstick.judge(&given);
        let bad: Vec<&[usize]> = judgement.outputs.iter().map(|verdict| &verdict.bad_rows[..]).collect();
        assert_eq!(bad, [&[] as &[usize], &[27, 55], &[]]);
        assert_eq!(judgement.outputs.iter().map(|it| it.rows).collect::<Vec<_>>(), [80, 56, 56]);
        let rows = [27, 55].map(|row: usize| yardstick.of(Name::K).rows()[row].to_string());
        assert_eq!(rows, ["batch 1, head 1, key 6", "batch 3, head 1, key 13"]);
        assert_eq!(yardstick.of(Name::Q).rows()[79].to_string(), "batch 3, head 3, query 4");
        let written = serde_json::to_value(&judgement).unwrap();
        let row = serde_json::json!({"batch": 1, "head": 1, "key": 6});
        assert_eq!((&written["first_bad"]["output"], &written["first_bad"]["row"]), (&"k".into(), &row));
        assert_eq!((&written["k"]["rows"], &written["v"]["max"]["error"]), (&56.into(), &0.0.into()));
    }

    #[test]
    fn a_forward_judgement_is_written_as_evidence_has_it() {
        let problem = Problem::new(1, 1, 3, 4, DType::F16).with_lse();
        let yardstick = yardstick(problem, Distribution::Normal);
        let o = best(&yardstick, DType::F16);
        let keys = |value: &serde_json::Value| -> Vec<String> {
            value.as_object().unwrap().keys().cloned().collect()
        };
        let written =
            serde_json::to_value(yardstick.judge(&[(Name::O, &o[..]), (Name::Lse, &[9.0; 3])])).unwrap();
        assert_eq!(keys(&written), ["first_bad", "lse", "max", "rms", "row", "rows"]);
        assert_eq!(keys(&written["lse"]), ["allowed", "error", "floor", "plain"]);
        let bad = &written["first_bad"];
        assert_eq!(keys(bad), ["actual", "allowed", "column", "expected", "lse", "row"]);
        assert_eq!(
            (&bad["lse"], &bad["row"]),
            (&true.into(), &serde_json::json!({"batch": 0, "head": 0, "query": 0}))
        );
        let written = serde_json::to_value(yardstick.judge(&[(Name::O, &o)])).unwrap();
        assert!(written["lse"].is_null() && written["first_bad"].is_null() && written["rows"] == 3);
    }
}
