//! The checker: finds what is wrong in a kernel without running it.
//!
//! [`KernelBuilder::finish`](crate::KernelBuilder::finish) runs it. After an edit of a finished kernel it can be
//! run again. It looks at each instruction (operands, forbidden combinations, the target), at labels and
//! barriers, at constant shared addresses, and along every path at registers that are read before they are
//! written and at `wgmma` stages.

mod barriers;
mod combinations;
mod labels;
mod operands;
mod shared;
mod wgmma;
mod written;

use std::collections::HashSet;

use crate::error::{BuildError, Fault};
use crate::flow::Flow;
use crate::inst::Op;
use crate::module::{Kernel, Module};
use crate::types::Target;

/// The most bytes of parameters that every driver accepts.
const MAX_PARAM_BYTES: u32 = 4096;

/// Every fault of a module.
pub fn module(module: &Module) -> Vec<BuildError> {
    let mut errors: Vec<_> = module.kernels.iter().flat_map(|k| kernel(k, module.target)).collect();
    let mut names = HashSet::new();
    for kernel in &module.kernels {
        if !names.insert(&kernel.name) {
            let fault = Fault::Forbidden("another kernel of the module has the same name".to_owned());
            errors.push(of_kernel(kernel, fault));
        }
    }
    errors
}

/// Every fault of a kernel for a target.
pub fn kernel(kernel: &Kernel, target: Target) -> Vec<BuildError> {
    let mut errors = Vec::new();
    if let Err(error) = kernel.shared.fits(target) {
        errors.push(of_kernel(kernel, error.into()));
    }
    errors.extend(directives(kernel, target).into_iter().map(|fault| of_kernel(kernel, fault)));

    let mut at = |index: usize, fault: Fault| errors.push(at(kernel, index, fault));
    for (i, inst) in kernel.body.iter().enumerate() {
        let needs = inst.op.needs().target;
        if needs > target {
            at(i, Fault::Target { syntax: inst.op.syntax(), needs, target });
        }
        for fault in operands::faults(kernel, inst) {
            at(i, fault);
        }
        for message in combinations::faults(inst) {
            at(i, Fault::Forbidden(message));
        }
    }
    labels::check(kernel, &mut at);
    barriers::check(kernel, &mut at);
    shared::check(kernel, &mut at);

    let flow = Flow::new(kernel);
    written::check(kernel, &flow, &mut at);
    wgmma::check(kernel, &flow, &mut at);
    errors
}

/// A fault of one instruction.
fn at(kernel: &Kernel, index: usize, fault: Fault) -> BuildError {
    let place = crate::module::Place { loc: None, ..kernel.describe(index) };
    let place = Some(place.to_string()).filter(|p| !p.is_empty());
    BuildError { kernel: kernel.name.clone(), loc: kernel.body.get(index).and_then(|i| i.loc), place, fault }
}

/// A fault of a kernel as a whole.
pub(crate) fn of_kernel(kernel: &Kernel, fault: Fault) -> BuildError {
    BuildError { kernel: kernel.name.clone(), loc: None, place: None, fault }
}

/// What is wrong in the kernel's name, parameters and launch bounds.
fn directives(kernel: &Kernel, target: Target) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut refuse = |condition: bool, message: String| {
        if condition {
            faults.push(Fault::Forbidden(message));
        }
    };
    let mut named = |name: &str, first: fn(&char) -> bool| {
        let mut letters = name.chars();
        let fits = letters.next().is_some_and(|c| first(&c))
            && letters.all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '$');
        refuse(
            !fits,
            format!("`{name}` is not a PTX name: ASCII letters, digits, `_` and `$`, a letter first"),
        );
    };
    named(&kernel.name, char::is_ascii_alphabetic);
    for param in &kernel.params {
        named(param.name.trim_start_matches('_'), char::is_ascii_alphanumeric);
    }
    refuse(
        kernel.param_bytes() > MAX_PARAM_BYTES,
        format!("parameters of {} bytes: every driver takes {MAX_PARAM_BYTES}", kernel.param_bytes()),
    );
    if let Some(threads) = kernel.threads {
        let count = threads.count();
        refuse(count == 0 || count > 1024, format!("a block of {count} threads: it has 1 to 1024"));
    }
    if let Some(shape) = kernel.cluster {
        let blocks = shape.iter().fold(1u32, |count, &n| count.saturating_mul(n));
        refuse(target < Target::Sm90, format!("clusters need sm_90 or later; the kernel is for {target}"));
        refuse(blocks == 0 || blocks > 16, format!("a cluster of {blocks} blocks: it has 1 to 16"));
    }
    let takes_registers = kernel.body.iter().any(|inst| matches!(inst.op, Op::SetMaxNReg { .. }));
    refuse(
        takes_registers && kernel.threads.is_none() && kernel.max_regs.is_none(),
        "setmaxnreg has no effect unless the kernel states its threads or its registers".to_owned(),
    );
    faults
}
