//! The public call: what to compute, on which device, into which memory.

use crate::{
    DType, Device, Error, Mask, Name, Problem, Result, Tensor, TensorBuf, TensorMut,
    contract::{self, Call},
    problem::default_scale,
    signature::{PerTensor, Role},
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
    key_lengths: Option<KeyLengths<'a>>,
    lse: bool,
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

    /// Also return lse.
    pub fn with_lse(self) -> Self {
        Self { lse: true, ..self }
    }

    /// The lengths that [`Attention::key_lengths`] was given, if it was.
    #[doc(hidden)]
    pub fn host_key_lengths(&self) -> Option<&'a [u32]> {
        self.key_lengths.and_then(KeyLengths::on_host)
    }

    /// The problem that these options and tensors pose, or what is wrong with them.
    pub fn problem(&self, q: &Tensor<'_>, k: &Tensor<'_>, v: &Tensor<'_>) -> Result<Problem> {
        let [batch, heads_q, len_q, head_dim] = q.shape();
        let [_, heads_kv, len_k, _] = k.shape();
        let mut problem = Problem::new(batch, heads_q, len_q, head_dim, q.dtype())
            .with_kv(heads_kv, len_k)
            .with_head_dim_v(v.shape()[3])
            .with_mask(self.mask)
            .with_scale(self.scale.unwrap_or_else(|| default_scale(head_dim)))
            .with_softcap(self.softcap.unwrap_or(0.0));
        problem.key_lengths = self.key_lengths.is_some();
        problem.lse = self.lse;
        contract::check(&problem, &inputs(q, k, v), Role::In)?;
        if let Some(lengths) = self.key_lengths {
            match lengths {
                KeyLengths::Host(lengths) => contract::check_key_lengths(&problem, lengths)?,
                KeyLengths::Device(lengths) => contract::check_device_lengths(&problem, &lengths)?,
            }
        }
        problem.check()
    }

    /// Runs, and returns outputs in memory of their own.
    pub fn run(&self, device: &Device, q: &Tensor<'_>, k: &Tensor<'_>, v: &Tensor<'_>) -> Result<Output> {
        let problem = self.problem(q, k, v)?;
        let shape = [problem.batch, problem.heads_q, problem.len_q, problem.head_dim_v];
        let mut o = TensorBuf::zeros(problem.dtype, Layout::ordered_like(shape, &q.layout()))?;
        let lse_layout = Layout::bhsd([problem.batch, problem.heads_q, problem.len_q, 1]);
        let mut lse = problem.lse.then(|| TensorBuf::zeros(DType::F32, lse_layout)).transpose()?;
        let (o_view, lse_view) = (o.view_mut(), lse.as_mut().map(TensorBuf::view_mut));
        self.run_checked(device, problem, &inputs(q, k, v), &o_view, lse_view.as_ref())?;
        Ok(Output { o, lse })
    }

    /// Runs into memory that is already there; lse is computed if there is a place for it.
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
        let mut problem = self.problem(q, k, v)?;
        problem.lse = lse.is_some();
        self.run_checked(device, problem, &inputs(q, k, v), o, lse.map(|lse| &*lse))
    }

    /// Runs a problem whose inputs were checked.
    fn run_checked(
        &self,
        device: &Device,
        problem: Problem,
        inputs: &PerTensor<Raw>,
        o: &TensorMut<'_>,
        lse: Option<&TensorMut<'_>>,
    ) -> Result<()> {
        let mut tensors = *inputs;
        tensors.set(Name::O, o.raw);
        if let Some(lse) = lse {
            tensors.set(Name::Lse, lse.raw);
        }
        contract::check(&problem, &tensors, Role::Out)?;
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
        if signature.outputs().all(|output| output.shape.contains(&0)) {
            return Ok(());
        }
        device.run(&Call {
            problem,
            tensors,
            key_lengths: self.key_lengths.and_then(KeyLengths::on_host),
            device_lengths: device_lengths.map(|lengths| lengths.address()),
        })
    }
}

fn inputs(q: &Tensor<'_>, k: &Tensor<'_>, v: &Tensor<'_>) -> PerTensor<Raw> {
    PerTensor::default().with(Name::Q, q.raw).with(Name::K, k.raw).with(Name::V, v.raw)
}
