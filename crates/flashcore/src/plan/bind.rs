//! What a call gives for the tensors of its problem, and the parameters that the launches of a plan make of it.

use flashcore_kernels::{Args, BindError, Kernel, Map, Operand, Packed, TensorArg};
use flashcore_ptx::{TensorMap, TraceSize};

use super::{Plan, fold::fold_layout};
use crate::{Error, Layout, Name, Result, signature::PerTensor};

/// Where the tensors of a call lie in a device's memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bindings {
    /// The address and the layout of each tensor.
    pub tensors: PerTensor<(u64, Layout)>,
    /// Where the key lengths are, one u32 per batch entry, if there are any.
    pub key_lengths: Option<u64>,
    /// Where the workspace is, if the plan asks for one.
    pub workspace: u64,
    /// Where a traced plan writes its stamps, and how many there is room for.
    #[doc(hidden)]
    pub trace: Option<(u64, TraceSize)>,
}

impl Bindings {
    /// These tensors, without key lengths and workspace.
    pub fn of(tensors: impl IntoIterator<Item = (Name, u64, Layout)>) -> Self {
        let all = tensors.into_iter();
        let tensors =
            all.fold(PerTensor::default(), |all, (name, address, layout)| all.with(name, (address, layout)));
        Self { tensors, ..Self::default() }
    }
}

/// The tensor of a call that a kernel calls by this name.
pub(super) fn operand(name: Name) -> Operand {
    match name {
        Name::Q => Operand::Q,
        Name::K => Operand::K,
        Name::V => Operand::V,
        Name::O => Operand::O,
        Name::Lse => Operand::Lse,
        Name::Do => Operand::Do,
        Name::Dlse => Operand::Dlse,
        Name::Dq => Operand::Dq,
        Name::Dk => Operand::Dk,
        Name::Dv => Operand::Dv,
        Name::QDescale => Operand::QDescale,
        Name::KDescale => Operand::KDescale,
        Name::VDescale => Operand::VDescale,
        Name::QStarts => Operand::QStarts,
        Name::KStarts => Operand::KStarts,
        Name::Pages => Operand::Pages,
        Name::KeyLengths => Operand::KeyLengths,
        Name::NewK => Operand::NewK,
        Name::NewV => Operand::NewV,
        Name::NewStarts => Operand::NewStarts,
        Name::Cos => Operand::Cos,
        Name::Sin => Operand::Sin,
        Name::Positions => Operand::Positions,
        Name::Tensor => unreachable!("no tensor of a signature"),
    }
}

/// A tensor as the kernels see it, with elements of so many bytes.
pub(super) fn tensor_arg(address: u64, layout: &Layout, size: usize) -> TensorArg {
    let [batch, head, row, _] = layout.strides;
    let strides = [batch, head, row].map(|stride| (stride * size) as u64);
    TensorArg { address, shape: layout.shape, strides }
}

impl Plan {
    /// The parameters of the launches, for tensors that lie there. `encode` makes the tensor maps that the kernels copy
    /// with. Nothing is allocated unless there are many.
    pub fn bind(
        &self,
        bindings: &Bindings,
        encode: &mut dyn FnMut(&Map) -> Result<TensorMap>,
    ) -> Result<Packed> {
        let args = self.args(bindings);
        let attended = self.workspace.attended(&args);
        let mut packed = Packed::default();
        for launch in &self.launches {
            let before = matches!(launch.kernel(), Kernel::Quantize | Kernel::Append);
            let args = if before { &args } else { &attended };
            launch.schedule.check_args(args).map_err(|error| self.refuse(error))?;
            launch.schedule.bind(&launch.spec, args, encode, &mut packed)?;
        }
        Ok(packed)
    }

    /// What the launches are bound to.
    pub(super) fn args(&self, bindings: &Bindings) -> Args {
        let problem = &self.folded.problem;
        let band = problem.mask.band();
        // A bound this large reaches over every key from every query.
        let unlimited = problem.len_q + problem.len_k;
        let bound = |side: Option<usize>| side.map_or(unlimited, |side| side.min(unlimited)) as i32;
        let mut args = Args::default();
        (args.scale, args.softcap) = (problem.scale, problem.softcap);
        (args.left, args.right) = (bound(band.left), bound(band.right));
        (args.section, args.parts) = (self.section, self.workspace.parts());
        (args.sequences, args.longest) =
            (problem.batch as u32, [problem.len_q, problem.len_k].map(|len| len as u32));
        for parameter in &self.problem.signature() {
            if let Some((address, layout)) = bindings.tensors.get(parameter.name) {
                let layout = fold_layout(layout, parameter, &self.problem, &self.folded);
                args.set(operand(parameter.name), tensor_arg(*address, &layout, parameter.dtype.size()));
            }
        }
        if let Some(address) = bindings.key_lengths {
            args.set(Operand::KeyLengths, TensorArg { address, ..TensorArg::default() });
        }
        self.workspace.bind(bindings.workspace, &mut args);
        args.trace = bindings.trace.map(|(address, size)| size.params(address));
        args
    }

    fn refuse(&self, error: BindError) -> Error {
        let BindError::RowStride { operand: of, given, most } = error;
        let signature = self.problem.signature();
        let mut names = signature.iter().map(|parameter| parameter.name);
        let tensor = names.find(|&name| operand(name) == of).unwrap_or(Name::Tensor);
        Error::Unsupported {
            device: self.target.to_string(),
            what: format!("rows of {tensor} that are {given} bytes apart"),
            possible: format!("up to {most} bytes; copy {tensor} to a denser layout"),
            source: None,
        }
    }
}
