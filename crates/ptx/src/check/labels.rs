//! Labels: each is placed once, and every branch has its target.

use std::collections::HashMap;

use crate::error::Fault;
use crate::inst::{LabelId, Op};
use crate::module::Kernel;

pub(super) fn check(kernel: &Kernel, at: &mut dyn FnMut(usize, Fault)) {
    let fault = |label: LabelId, problem| Fault::Label { label: kernel.label_name(label), problem };
    let mut places: HashMap<LabelId, usize> = HashMap::new();
    for (i, inst) in kernel.body.iter().enumerate() {
        if let Op::Label(label) = inst.op {
            if places.insert(label, i).is_some() {
                at(i, fault(label, "stands twice"));
            }
            if label.0 as usize >= kernel.labels.len() {
                at(i, fault(label, "has no name"));
            }
            if inst.guard.is_some() {
                at(i, fault(label, "is guarded, which only instructions can be"));
            }
        }
    }
    for (i, inst) in kernel.body.iter().enumerate() {
        if let Op::Bra { target, reconverge } = inst.op {
            if !places.contains_key(&target) {
                at(i, fault(target, "is branched to, but stands nowhere"));
            }
            if let Some(label) = reconverge.filter(|l| !places.contains_key(l)) {
                at(i, fault(label, "is a meeting point, but stands nowhere"));
            }
        }
    }
}
