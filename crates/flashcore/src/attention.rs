//! The public call: what to compute, on which device, into which memory.

use std::marker::PhantomData;

use crate::{
    Append, Appending, DType, Descales, Device, Error, Keys, Mask, Name, Pages, Pass, Problem, Quantiser,
    Queries, Result, Starts, Tensor, TensorBuf, TensorMut,
    contract::{self, Call},
    problem::default_scale,
    signature::{PerTensor, Role, Rows},
    tensor::{DeviceLengths, Layout, Raw},
};

/// Attention with its options, ready to run on tensors.
///
/// ```
/// use flashcore::{Attention, Device, Tensor};
///
/// // Two heads of 128 queries and keys with head_dim 64, as (batch, heads, length, head_dim).
/// let data: Vec<f32> = (0..2 * 128 * 64).map(|i| (i as f32 * 0.7).sin()).collect();
/// let q = Tensor::new(&data, &[1, 2, 128, 64])?;
/// let out = Attention::new().causal().softcap(30.0).run(&Device::best(), &q, &q, &q)?;
/// assert_eq!(out.o.shape(), [1, 2, 128, 64]);
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Attention<'a> {
    mask: Mask,
    scale: Option<f32>,
    softcap: Option<f32>,
    q_starts: Option<Starts<'a>>,
    k_starts: Option<Starts<'a>>,
    pages: Option<Pages<'a>>,
    key_lengths: Option<KeyLengths<'a>>,
    descales: Descales<'a>,
    quantise: Option<Quantiser>,
    out: Option<DType>,
    lse: bool,
    checked: bool,
}

/// Where the key lengths of a call are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum KeyLengths<'a> {
    Host(&'a [u32]),
    Device(DeviceLengths<'a>),
}

impl<'a> KeyLengths<'a> {
    /// The lengths, where they can be read.
    fn on_host(self) -> Option<&'a [u32]> {
        match self {
            KeyLengths::Host(lengths) => Some(lengths),
            KeyLengths::Device(_) => None,
        }
    }

    fn on_device(self) -> Option<DeviceLengths<'a>> {
        match self {
            KeyLengths::Host(_) => None,
            KeyLengths::Device(lengths) => Some(lengths),
        }
    }
}

/// What a run returns.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Output {
    /// The output, (batch, heads, length, head_dim_v), with heads and length in memory as q has them.
    pub o: TensorBuf,
    /// The natural logarithm of the sum of exponentials, one per query, as (batch, heads, length, 1), if it was asked for.
    pub lse: Option<TensorBuf>,
}

/// The tensors that a backward pass reads: what the forward pass read and gave, and the gradients of what it gave.
#[derive(Clone, Copy, Debug)]
pub struct Backward<'t> {
    tensors: PerTensor<Raw>,
    lifetime: PhantomData<&'t [u8]>,
}

impl<'t> Backward<'t> {
    /// The q, k and v of a forward pass, its o and lse, and the gradient of o.
    pub fn new(inputs: [&Tensor<'t>; 3], o: &Tensor<'t>, lse: &Tensor<'t>, d_o: &Tensor<'t>) -> Self {
        let [q, k, v] = inputs;
        let tensors = read(q, k, v).with(Name::O, o.raw).with(Name::Lse, lse.raw).with(Name::Do, d_o.raw);
        Self { tensors, lifetime: PhantomData }
    }

    /// With the gradient of lse, where lse has a part in what is differentiated.
    pub fn with_dlse(mut self, dlse: &Tensor<'t>) -> Self {
        self.tensors.set(Name::Dlse, dlse.raw);
        self
    }

    /// One of the tensors, if it was given.
    #[doc(hidden)]
    pub fn tensor(&self, name: Name) -> Option<Tensor<'t>> {
        self.tensors.get(name).map(|&raw| Tensor::of(raw))
    }
}

/// What a backward pass returns: gradients with the shapes of q, k and v, and with heads and length in memory as those have
/// them.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Gradients {
    /// The gradient of q.
    pub dq: TensorBuf,
    /// The gradient of k, summed over the query heads that share a kv head.
    pub dk: TensorBuf,
    /// The gradient of v, summed likewise.
    pub dv: TensorBuf,
}

impl<'a> Attention<'a> {
    /// Without a mask, with the scale 1/√head_dim.
    pub fn new() -> Self {
        Self::default()
    }

    /// Each query attends up to its own place, counted from the end: the last query sees the last key.
    pub fn causal(self) -> Self {
        self.mask(Mask::Causal)
    }

    /// Each query attends up to its own place, counted from the start (torch's `is_causal`).
    pub fn causal_top_left(self) -> Self {
        self.mask(Mask::CausalTopLeft)
    }

    /// Each query attends to `left` keys before and `right` keys after its own place; `None` is without limit.
    pub fn window(self, left: impl Into<Option<usize>>, right: impl Into<Option<usize>>) -> Self {
        self.mask(Mask::Window { left: left.into(), right: right.into() })
    }

    /// With any mask.
    pub fn mask(self, mask: Mask) -> Self {
        Self { mask, ..self }
    }

    /// With a scale of its own instead of 1/√head_dim.
    pub fn scale(self, scale: f32) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// Scores become `softcap · tanh(score / softcap)`; 0 turns it off.
    pub fn softcap(self, softcap: f32) -> Self {
        Self { softcap: Some(softcap), ..self }
    }

    /// Queries and keys of several sequences, one behind the other: q, k, v, o and lse have the shape (1, heads, tokens, …),
    /// and each sequence attends to itself. Masks are aligned within a sequence. What belongs to no sequence is not written.
    pub fn packed(self, starts: Starts<'a>) -> Self {
        self.packed_queries(starts).packed_keys(starts)
    }

    /// Packed queries, with keys that lie otherwise, or whose sequences have other lengths.
    pub fn packed_queries(self, starts: Starts<'a>) -> Self {
        Self { q_starts: Some(starts), ..self }
    }

    /// Packed keys and values.
    pub fn packed_keys(self, starts: Starts<'a>) -> Self {
        Self { k_starts: Some(starts), pages: None, ..self }
    }

    /// Keys and values in pages of a cache. [`Attention::key_lengths`] say how many keys each sequence has; without them all
    /// of their pages are full.
    pub fn paged(self, pages: Pages<'a>) -> Self {
        Self { pages: Some(pages), k_starts: None, ..self }
    }

    /// Only the first `key_lengths[b]` keys of batch entry b exist; causal and window count from there.
    ///
    /// ```
    /// use flashcore::{Attention, Device, Tensor};
    /// let q = [1.0_f32, 1.0];
    /// let kv = [1.0_f32, 3.0, 100.0, 100.0];
    /// let q = Tensor::new(&q, &[2, 1, 1, 1])?;
    /// let kv = Tensor::new(&kv, &[2, 1, 2, 1])?;
    /// let out = Attention::new().key_lengths(&[1, 0]).run(&Device::cpu(), &q, &kv, &kv)?;
    /// assert_eq!(out.o.to_f32(), [1.0, 0.0]); // no keys: zeros
    /// # Ok::<(), flashcore::Error>(())
    /// ```
    pub fn key_lengths(self, key_lengths: &'a [u32]) -> Self {
        Self { key_lengths: Some(KeyLengths::Host(key_lengths)), ..self }
    }

    /// The same with lengths that lie in the memory of the GPU where the call runs: nothing is copied, and a
    /// captured call reads them anew at every replay.
    pub fn key_lengths_on_device(self, key_lengths: DeviceLengths<'a>) -> Self {
        Self { key_lengths: Some(KeyLengths::Device(key_lengths)), ..self }
    }

    /// With descales of q, k and v, where those are f8. k and v may be so alone, as of a cache.
    pub fn descales(self, descales: Descales<'a>) -> Self {
        Self { descales, ..self }
    }

    /// With q, k and v of 16 or 32 bits that become f8 before they are computed with: see [`Quantiser`]. The output is f16
    /// where q is, and else bf16, unless another of the two is asked for.
    pub fn fp8(self, quantiser: Quantiser) -> Self {
        Self { quantise: Some(quantiser), ..self }
    }

    /// With an output of this type: bf16 (the default) or f16 where q, k and v are f8, and their own type elsewhere.
    pub fn output(self, out: DType) -> Self {
        Self { out: Some(out), ..self }
    }

    /// Also look at starts, tables and key lengths that lie in a GPU's memory before the call: it then waits for the GPU, and
    /// refuses what the same call on the host refuses. For tests and for the search for a mistake; it cannot be captured.
    pub fn checked(self) -> Self {
        Self { checked: true, ..self }
    }

    /// Also return lse.
    pub fn with_lse(self) -> Self {
        Self { lse: true, ..self }
    }

    /// The lengths that [`Attention::key_lengths`] was given, if it was.
    #[doc(hidden)]
    pub fn host_key_lengths(&self) -> Option<&'a [u32]> {
        self.key_lengths.and_then(KeyLengths::on_host)
    }

    /// Where packed queries and keys begin, if they were said to be packed.
    #[doc(hidden)]
    pub fn given_starts(&self) -> [Option<Starts<'a>>; 2] {
        [self.q_starts, self.k_starts]
    }

    /// The pages that [`Attention::paged`] was given.
    #[doc(hidden)]
    pub fn given_pages(&self) -> Option<Pages<'a>> {
        self.pages
    }

    /// The descales that [`Attention::descales`] was given.
    #[doc(hidden)]
    pub fn given_descales(&self) -> Descales<'a> {
        self.descales
    }

    /// The problem that these options and tensors pose, or what is wrong with them.
    pub fn problem(&self, q: &Tensor<'_>, k: &Tensor<'_>, v: &Tensor<'_>) -> Result<Problem> {
        self.posed(Pass::Forward, &self.read(q, k, v), None)
    }

    /// The problem of a call that appends to a cache.
    pub fn append_problem(
        &self,
        new: &Append<'_>,
        q: &Tensor<'_>,
        k: &Tensor<'_>,
        v: &Tensor<'_>,
    ) -> Result<Problem> {
        self.posed(Pass::Forward, &self.read_new(new, q, k, v), Some(new.appending()?))
    }

    /// What a call that appends reads.
    fn read_new(&self, new: &Append<'_>, q: &Tensor<'_>, k: &Tensor<'_>, v: &Tensor<'_>) -> PerTensor<Raw> {
        let mut tensors = self.read(q, k, v);
        new.into_tensors(&mut tensors);
        tensors
    }

    /// What a forward pass reads.
    fn read(&self, q: &Tensor<'_>, k: &Tensor<'_>, v: &Tensor<'_>) -> PerTensor<Raw> {
        let mut tensors = self.placed(read(q, k, v));
        self.descales.into_tensors(&mut tensors);
        tensors
    }

    /// With what says where sequences are.
    fn placed(&self, mut tensors: PerTensor<Raw>) -> PerTensor<Raw> {
        for (name, starts) in [(Name::QStarts, self.q_starts), (Name::KStarts, self.k_starts)] {
            if let Some(starts) = starts {
                tensors.set(name, starts.raw);
            }
        }
        if let Some(pages) = self.pages {
            let [.., page, _] = tensors[Name::K].layout.shape;
            tensors.set(Name::Pages, pages.read(page));
        }
        tensors
    }

    /// How queries and keys lie, of how many sequences, and the most of them.
    fn layouts(&self, [q, k]: [Layout; 2]) -> Result<(usize, [usize; 2], Queries, Keys)> {
        let mut sequences = q.shape[0];
        let (mut len_q, mut len_k) = (q.shape[2], k.shape[2]);
        let (mut queries, mut keys) = (Queries::Dense, Keys::Dense);
        if let Some(starts) = self.k_starts {
            starts.check(Name::KStarts)?;
            let total = len_k;
            keys = if starts.is_apart() { Keys::Apart { total } } else { Keys::Packed { total } };
            len_k = starts.longest();
        }
        if let Some(pages) = self.pages {
            let page = k.shape[2];
            (keys, len_k) = (Keys::Paged { page, pages: k.shape[0] }, pages.most_keys(page));
            pages.check(page)?;
        }
        if let Some(starts) = self.q_starts {
            starts.check(Name::QStarts)?;
            (sequences, queries, len_q) =
                (starts.sequences(), Queries::Packed { total: len_q }, starts.longest());
        }
        Ok((sequences, [len_q, len_k], queries, keys))
    }

    /// The problem that these options and tensors pose for the backward pass, or what is wrong with them.
    pub fn backward_problem(&self, given: &Backward<'_>) -> Result<Problem> {
        self.posed(Pass::Backward, &self.placed(given.tensors), None)
    }

    fn posed(&self, pass: Pass, inputs: &PerTensor<Raw>, append: Option<Appending>) -> Result<Problem> {
        let shape = |name: Name| inputs[name].layout.shape;
        let [_, heads_q, _, head_dim] = shape(Name::Q);
        let [_, heads_kv, ..] = shape(Name::K);
        let (batch, [len_q, len_k], queries, keys) =
            self.layouts([Name::Q, Name::K].map(|name| inputs[name].layout))?;
        let mut problem = Problem::new(batch, heads_q, len_q, head_dim, inputs[Name::Q].dtype)
            .with_kv(heads_kv, len_k)
            .with_queries(queries)
            .with_keys(keys)
            .with_head_dim_v(shape(Name::V)[3])
            .with_mask(self.mask)
            .with_scale(self.scale.unwrap_or_else(|| default_scale(head_dim)))
            .with_softcap(self.softcap.unwrap_or(0.0));
        problem.key_lengths = self.key_lengths.is_some();
        problem.append = append;
        problem.descales = self.descales.given();
        problem.descale_keys = self.descales.keys();
        problem.quantise = self.quantise;
        // A cache of f8; what else does not fit is refused.
        let (of_q, of_k) = (problem.dtype, inputs[Name::K].dtype);
        if of_k.is_f8() && matches!(of_q, DType::F16 | DType::BF16) {
            problem.dtype_kv = Some(of_k);
        }
        problem = self.out.map_or(problem, |out| problem.with_out(out));
        problem.pass = pass;
        problem.lse = match pass {
            Pass::Forward => self.lse,
            Pass::Backward => inputs.get(Name::Dlse).is_some(),
        };
        contract::check(&problem, inputs, Role::In)?;
        self.descales.check(&problem)?;
        if let Some(lengths) = self.key_lengths {
            match lengths {
                KeyLengths::Host(lengths) => contract::check_key_lengths(&problem, lengths)?,
                KeyLengths::Device(lengths) => contract::check_device_lengths(&problem, &lengths)?,
            }
        }
        let problem = problem.check()?;
        // How many keys a sequence has is not known here, where its length lies on a GPU.
        if !matches!(self.key_lengths, Some(KeyLengths::Device(_))) {
            contract::check_places(&problem, inputs, self.host_key_lengths())?;
        }
        Ok(problem)
    }

    /// Runs, and returns outputs in memory of their own.
    pub fn run(&self, device: &Device, q: &Tensor<'_>, k: &Tensor<'_>, v: &Tensor<'_>) -> Result<Output> {
        self.run_to_own(device, self.problem(q, k, v)?, q, self.read(q, k, v))
    }

    /// Runs a problem whose inputs were checked, into memory of its own.
    fn run_to_own(
        &self,
        device: &Device,
        problem: Problem,
        q: &Tensor<'_>,
        mut tensors: PerTensor<Raw>,
    ) -> Result<Output> {
        let [batch, heads, len, _] = q.shape();
        let shape = [batch, heads, len, problem.head_dim_v];
        let mut o = TensorBuf::zeros(problem.out(), Layout::ordered_like(shape, &q.layout()))?;
        let lse_layout = Layout::bhsd([batch, heads, len, 1]);
        let mut lse = problem.lse.then(|| TensorBuf::zeros(DType::F32, lse_layout)).transpose()?;
        tensors.set(Name::O, o.view_mut().raw);
        if let Some(lse) = &mut lse {
            tensors.set(Name::Lse, lse.view_mut().raw);
        }
        self.run_checked(device, problem, &tensors)?;
        Ok(Output { o, lse })
    }

    /// A step of decoding: writes new keys and values into a cache, behind those that each sequence has there, and attends
    /// to all of them. [`Attention::key_lengths`] are those before, and are needed; where the cache lies packed, apart or in
    /// pages, that is said as for any other call. See [`Append`].
    pub fn append(
        &self,
        device: &Device,
        new: &Append<'_>,
        q: &Tensor<'_>,
        k: &mut TensorMut<'_>,
        v: &mut TensorMut<'_>,
    ) -> Result<Output> {
        let (k, v) = (&k.as_tensor(), &v.as_tensor());
        self.run_to_own(device, self.append_problem(new, q, k, v)?, q, self.read_new(new, q, k, v))
    }

    /// The same into memory that is already there; lse is computed if there is a place for it.
    #[allow(clippy::too_many_arguments)] // They are the tensors of one call.
    pub fn append_into(
        &self,
        device: &Device,
        new: &Append<'_>,
        q: &Tensor<'_>,
        k: &mut TensorMut<'_>,
        v: &mut TensorMut<'_>,
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> Result<()> {
        let (k, v) = (&k.as_tensor(), &v.as_tensor());
        let mut problem = self.append_problem(new, q, k, v)?;
        problem.lse = lse.is_some();
        let mut tensors = self.read_new(new, q, k, v).with(Name::O, o.raw);
        if let Some(lse) = lse {
            tensors.set(Name::Lse, lse.raw);
        }
        self.run_checked(device, problem, &tensors)
    }

    /// Runs into memory that is already there; lse is computed if there is a place for it. Where q, k and v are f8, o may
    /// be bf16 or f16.
    ///
    /// ```
    /// use flashcore::{Attention, Device, Tensor, TensorMut};
    /// let data = vec![0.5_f32; 64 * 32];
    /// let q = Tensor::bshd(&data, &[1, 64, 2, 16])?; // (batch, length, heads, head_dim)
    /// let (mut o, mut lse) = (vec![0.0_f32; 64 * 32], vec![0.0_f32; 128]);
    /// Attention::new().run_into(
    ///     &Device::cpu(),
    ///     &q,
    ///     &q,
    ///     &q,
    ///     &mut TensorMut::bshd(&mut o, &[1, 64, 2, 16])?,
    ///     Some(&mut TensorMut::lse(&mut lse, [1, 2, 64])?),
    /// )?;
    /// assert!((o[0] - 0.5).abs() < 1e-6);
    /// # Ok::<(), flashcore::Error>(())
    /// ```
    pub fn run_into(
        &self,
        device: &Device,
        q: &Tensor<'_>,
        k: &Tensor<'_>,
        v: &Tensor<'_>,
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> Result<()> {
        // Where it can be of several types, the output that is given decides.
        let by_output = (q.dtype().is_f8() || self.quantise.is_some()) && self.out.is_none();
        let asked = if by_output { self.output(o.dtype()) } else { *self };
        let mut problem = asked.problem(q, k, v)?;
        problem.lse = lse.is_some();
        let mut tensors = self.read(q, k, v).with(Name::O, o.raw);
        if let Some(lse) = lse {
            tensors.set(Name::Lse, lse.raw);
        }
        self.run_checked(device, problem, &tensors)
    }

    /// The backward pass: computes the gradients of q, k and v, and returns them in memory of their own. The options are
    /// those of the forward pass.
    ///
    /// A query without keys and a key without queries have gradients of zero. The same call gives the same bits every time.
    ///
    /// ```
    /// use flashcore::{Attention, Backward, Device, Tensor};
    ///
    /// let data: Vec<f32> = (0..2 * 128 * 64).map(|i| (i as f32 * 0.7).sin()).collect();
    /// let q = Tensor::new(&data, &[1, 2, 128, 64])?;
    /// let attention = Attention::new().causal();
    /// let out = attention.with_lse().run(&Device::cpu(), &q, &q, &q)?;
    /// let (o, lse) = (out.o, out.lse.unwrap());
    /// // The gradient of the sum of all outputs.
    /// let ones = vec![1.0_f32; data.len()];
    /// let d_o = Tensor::new(&ones, &[1, 2, 128, 64])?;
    /// let given = Backward::new([&q, &q, &q], &o.view(), &lse.view(), &d_o);
    /// let gradients = attention.backward(&Device::cpu(), &given)?;
    /// // Every row of probabilities sums up to 1.
    /// let sum: f64 = gradients.dv.to_f32().into_iter().map(f64::from).sum();
    /// assert!((sum / (2.0 * 128.0 * 64.0) - 1.0).abs() < 1e-5);
    /// # Ok::<(), flashcore::Error>(())
    /// ```
    pub fn backward(&self, device: &Device, given: &Backward<'_>) -> Result<Gradients> {
        let problem = self.backward_problem(given)?;
        let gradient = |name| {
            let Raw { dtype, layout, .. } = given.tensors[name];
            TensorBuf::zeros(dtype, Layout::ordered_like(layout.shape, &layout))
        };
        let (mut dq, mut dk, mut dv) = (gradient(Name::Q)?, gradient(Name::K)?, gradient(Name::V)?);
        let outputs = [&dq.view_mut(), &dk.view_mut(), &dv.view_mut()].map(|output| output.raw);
        self.run_checked(device, problem, &self.placed(with_gradients(given, outputs)))?;
        Ok(Gradients { dq, dk, dv })
    }

    /// The backward pass into memory that is already there.
    pub fn backward_into(
        &self,
        device: &Device,
        given: &Backward<'_>,
        dq: &mut TensorMut<'_>,
        dk: &mut TensorMut<'_>,
        dv: &mut TensorMut<'_>,
    ) -> Result<()> {
        let problem = self.backward_problem(given)?;
        self.run_checked(device, problem, &self.placed(with_gradients(given, [dq.raw, dk.raw, dv.raw])))
    }

    /// Runs a problem whose inputs were checked.
    fn run_checked(&self, device: &Device, problem: Problem, tensors: &PerTensor<Raw>) -> Result<()> {
        contract::check(&problem, tensors, Role::Out)?;
        let signature = problem.signature();
        let places = signature.iter().map(|it| (it.name, tensors[it.name].place));
        let device_lengths = self.key_lengths.and_then(KeyLengths::on_device);
        let lengths_place = device_lengths.map(|lengths| (Name::KeyLengths, lengths.place()));
        for (tensor, given) in places.chain(lengths_place) {
            if given != tensors[Name::Q].place || !device.takes(given) {
                return Err(Error::PlaceMismatch { tensor, given, device: device.to_string() });
            }
        }
        // Whatever the other sizes say, there is nothing to write and so nothing to compute.
        let written = signature.outputs().chain(signature.iter().filter(|of| of.rows == Rows::NewKeys));
        if written.into_iter().all(|of| of.shape.contains(&0)) {
            return Ok(());
        }
        let call = Call {
            problem,
            tensors: *tensors,
            key_lengths: self.key_lengths.and_then(KeyLengths::on_host),
            device_lengths: device_lengths.map(|lengths| lengths.address()),
        };
        if self.checked {
            device.check_places(&call)?;
        }
        device.run(&call)
    }
}

fn with_gradients(given: &Backward<'_>, [dq, dk, dv]: [Raw; 3]) -> PerTensor<Raw> {
    given.tensors.with(Name::Dq, dq).with(Name::Dk, dk).with(Name::Dv, dv)
}

fn read(q: &Tensor<'_>, k: &Tensor<'_>, v: &Tensor<'_>) -> PerTensor<Raw> {
    PerTensor::default().with(Name::Q, q.raw).with(Name::K, k.raw).with(Name::V, v.raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: [usize; 4] = [1, 2, 3, 4];

    /// What becomes of a backward pass with these tensors.
    fn backward(lse: &Tensor<'_>, d_o: &Tensor<'_>, dlse: Option<&Tensor<'_>>) -> Result<Gradients> {
        let data = [0.5_f32; 24];
        let q = Tensor::new(&data, &SHAPE)?;
        let mut given = Backward::new([&q, &q, &q], &q, lse, d_o);
        if let Some(dlse) = dlse {
            given = given.with_dlse(dlse);
        }
        Attention::new().backward(&Device::cpu(), &given)
    }

    #[test]
    fn every_tensor_of_a_backward_pass_is_checked() {
        let (data, halves) = ([0.5_f32; 24], [half::f16::ONE; 24]);
        let lse = Tensor::new(&data[..6], &[1, 2, 3, 1]).unwrap();
        let d_o = Tensor::new(&data, &SHAPE).unwrap();
        assert!(backward(&lse, &d_o, Some(&lse)).is_ok());
        let half = Tensor::new(&halves, &SHAPE).unwrap();
        assert!(matches!(
            backward(&lse, &half, None),
            Err(Error::DTypeMismatch { tensor: Name::Do, expected: DType::F32, .. })
        ));
        let short = Tensor::new(&data[..4], &[1, 2, 2, 1]).unwrap();
        for (lse, dlse, wrong) in [(&short, None, Name::Lse), (&lse, Some(&short), Name::Dlse)] {
            match backward(lse, &d_o, dlse) {
                Err(Error::SizeMismatch {
                    tensor,
                    what: "length",
                    given: 2,
                    expected: 3,
                    other: Name::Q,
                }) => {
                    assert_eq!(tensor, wrong);
                }
                other => panic!("{other:?}"),
            }
        }
        let lengths = [4];
        let given = Backward::new([&d_o, &d_o, &d_o], &d_o, &lse, &d_o);
        let too_long = Attention::new().key_lengths(&lengths).backward(&Device::cpu(), &given);
        assert!(matches!(too_long, Err(Error::KeyLength { given: 4, len_k: 3, .. })));
    }

    #[test]
    fn gradients_may_share_memory_with_nothing() {
        let (data, mut memory) = ([0.5_f32; 24], [0.0_f32; 72]);
        let lse = Tensor::new(&data[..6], &[1, 2, 3, 1]).unwrap();
        let q = Tensor::new(&data, &SHAPE).unwrap();
        let given = Backward::new([&q, &q, &q], &q, &lse, &q);
        let (first, rest) = memory.split_at_mut(24);
        let (second, third) = rest.split_at_mut(24);
        let mut dq = TensorMut::new(first, &SHAPE).unwrap();
        let mut dk = TensorMut::new(second, &SHAPE).unwrap();
        let mut dv = TensorMut::new(third, &SHAPE).unwrap();
        let run = |dq: &mut TensorMut<'_>, dk: &mut TensorMut<'_>, dv: &mut TensorMut<'_>| {
            Attention::new().backward_into(&Device::cpu(), &given, dq, dk, dv)
        };
        assert_eq!(run(&mut dq, &mut dk, &mut dv), Ok(()));
        dv.raw = dk.raw;
        let shared = Error::Aliasing { output: Name::Dv, other: Name::Dk };
        assert_eq!(run(&mut dq, &mut dk, &mut dv), Err(shared));
        dq.raw = q.raw;
        assert_eq!(run(&mut dq, &mut dk, &mut dv), Err(Error::Aliasing { output: Name::Dq, other: Name::Q }));
    }
}
