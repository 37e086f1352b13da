//! Printed modules given to an independent parser: every form is read back token for token.
//!
//! The parser is `ptx-syntax`, generated from the PTX grammar. What it does not know is listed, and the list is
//! kept up to date: a form that it has learned to read must leave the list.

use flashcore_forms::{Form, all_forms, joined};
use flashcore_ptx::*;
use proptest::prelude::*;
use ptx_syntax::{
    PtxParseError, PtxToken, PtxUnlexer, PtxUnparser, parse_ptx, run_with_large_stack, tokenize,
};

/// The tokens of a text without whitespace, and those that the parser prints from what it understood.
fn read_back(text: &str) -> Result<(String, String), PtxParseError> {
    let written = tokenize(text).expect("the text has only PTX tokens");
    let written: Vec<PtxToken> = written.into_iter().map(|(token, _)| token).collect();
    let text_of = |tokens: &[PtxToken]| PtxUnlexer::to_string(tokens).expect("a string takes text");
    Ok((text_of(&written), text_of(&parse_ptx(text)?.to_tokens())))
}

/// Why the parser cannot read a form, if it cannot.
fn unknown_to_the_parser(inst: &Inst) -> Option<&'static str> {
    let half = |ty| matches!(ty, AtomTy::F16 | AtomTy::Bf16);
    match inst.op {
        Op::Red { .. } => Some("it reads no red with a memory order"),
        Op::BulkReduce { op, ty, .. } if !(op == AtomOp::Add && half(ty)) => {
            Some("it takes every reduction to global memory for one with .noftz")
        }
        Op::TensorReduce { policy: true, .. } => Some("it has no cache hint on a tensor reduction"),
        _ => None,
    }
}

/// The parser reads vectors of 1 to 4 and of 8 elements. Wider ones are cut to 8, and 5 coordinates to 4, so that
/// the rest of the instruction is still read.
fn narrow(kernel: &Kernel) -> Kernel {
    let mut kernel = kernel.clone();
    for inst in &mut kernel.body {
        match &mut inst.op {
            Op::Wgmma(_) if !matches!(inst.dst.len(), 2 | 4 | 8) => inst.dst.truncate(8),
            Op::TensorLoad { dims: dims @ Dims::D5, .. } => {
                *dims = Dims::D4;
                inst.src.remove(6);
            }
            Op::TensorStore { dims: dims @ Dims::D5, .. }
            | Op::TensorReduce { dims: dims @ Dims::D5, .. }
            | Op::TensorPrefetch { dims: dims @ Dims::D5, .. } => {
                *dims = Dims::D4;
                inst.src.remove(5);
            }
            _ => {}
        }
    }
    kernel
}

fn module(kernel: &Kernel) -> String {
    Module::new(Target::Sm90a).with(kernel.clone()).to_string()
}

#[test]
fn every_form_is_read_back_token_for_token() {
    let problems = run_with_large_stack(|| {
        let forms = all_forms();
        let (unknown, known): (Vec<&Form>, Vec<&Form>) =
            forms.iter().partition(|f| unknown_to_the_parser(f.inst()).is_some());
        // Many forms per kernel, since the parser is slow; where one is not read, each form by itself.
        let unread = known.chunks(32).filter(|forms| {
            let read = read_back(&module(&narrow(&joined(forms))));
            !read.is_ok_and(|(written, understood)| written == understood)
        });
        unread.flatten().chain(&unknown).filter_map(|form| problem(form)).collect::<Vec<_>>()
    });
    assert!(
        problems.is_empty(),
        "{} problems:\n{}",
        problems.len(),
        problems[..problems.len().min(40)].join("\n")
    );
}

/// What is wrong with a form that was read back.
fn problem(form: &Form) -> Option<String> {
    match (read_back(&module(&narrow(&form.kernel))), unknown_to_the_parser(form.inst())) {
        (Ok((written, understood)), None) => {
            (written != understood).then(|| format!("understood otherwise: {}", form.text()))
        }
        (Err(error), None) => Some(format!("{}: {error}", form.text())),
        (Ok(_), Some(reason)) => Some(format!("is read after all ({reason}): {}", form.text())),
        (Err(_), Some(_)) => None,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_kernel_of_any_forms_in_any_order_with_any_constants_is_read_back(
        picks in proptest::collection::vec(any::<proptest::sample::Index>(), 1..24),
        constants in proptest::collection::vec(any::<u64>(), 8),
    ) {
        let forms = all_forms();
        let known: Vec<&Form> = forms.iter().filter(|f| unknown_to_the_parser(f.inst()).is_none()).collect();
        let picked: Vec<&Form> = picks.iter().map(|i| *i.get(&known)).collect();
        let mut kernel = narrow(&joined(&picked));
        let mut next = constants.iter().cycle();
        for inst in kernel.body.iter_mut().filter(|i| matches!(i.op, Op::Alu(_))) {
            for arg in &mut inst.src {
                if let Arg::Imm(imm) = arg {
                    let bits = next.next().copied().unwrap_or_default();
                    imm.bits = match imm.class {
                        RegClass::Pred => bits & 1,
                        class => bits & (u64::MAX >> (64 - 8 * class.bytes())),
                    };
                }
            }
        }
        let text = module(&kernel);
        let read = run_with_large_stack(move || read_back(&text));
        let (written, understood) = read.map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert_eq!(written, understood);
    }
}

#[test]
fn a_printed_module_is_the_same_every_time() {
    let forms = all_forms();
    let picked: Vec<&Form> = forms.iter().step_by(7).collect();
    assert_eq!(module(&joined(&picked)), module(&joined(&picked)));
}
