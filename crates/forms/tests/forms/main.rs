//! Every form of the instruction table, given to ptxas: accepted by every target that claims it, at the version
//! that the table states, and refused one version and one target earlier.

mod combinations;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use flashcore_forms::{Form, all_forms, fixture, joined};
use flashcore_ptx::ptxas::{Ptxas, PtxasError};
use flashcore_ptx::*;

/// The ptxas of this machine. `None`, with the reason printed, where the test is skipped.
pub(crate) fn ptxas() -> Option<Ptxas> {
    let found = Ptxas::find_or_skip().unwrap_or_else(|error| panic!("{error}"));
    if found.is_none() {
        eprintln!("skipped: {}", PtxasError::NotFound);
    }
    found
}

/// A module text of several forms, and a map from the lines of their main instructions to the forms.
fn text<'f>(forms: &[&'f Form], isa: IsaVersion, target: Target) -> (String, BTreeMap<usize, &'f Form>) {
    let mut text = format!(".version {isa}\n.target {target}\n.address_size 64\n");
    text.push_str(".extern .shared .align 1024 .b8 smem[];\n");
    let mut lines = BTreeMap::new();
    for form in forms {
        let kernel = form.kernel.to_string();
        let wanted = form.text();
        // The main instruction is the last one with its text: the fixture may have the same one.
        let at = kernel.lines().collect::<Vec<_>>().iter().rposition(|l| l.trim() == wanted);
        lines.insert(text.lines().count() + at.expect("the instruction is printed") + 1, *form);
        write!(text, "{kernel}").expect("a string takes text");
    }
    (text, lines)
}

/// The needs of a form: those of its whole kernel, which its main instruction dominates.
fn isa(form: &Form, target: Target) -> IsaVersion {
    form.kernel.isa(target)
}

#[test]
fn every_line_of_the_table_is_reached_by_a_form() {
    let reached: BTreeSet<&str> = all_forms()
        .iter()
        .flat_map(|f| f.kernel.body.iter().map(|i| i.op.syntax()).collect::<Vec<_>>())
        .collect();
    for line in table::FAMILIES {
        assert!(reached.contains(line.syntax), "no form of `{}`", line.syntax);
    }
    for alu in Alu::ALL {
        assert!(reached.contains(alu.line().text), "no form of `{}`", alu.line().text);
    }
}

#[test]
fn ptxas_takes_every_form_on_every_target_that_claims_it_at_the_version_stated() {
    let Some(ptxas) = ptxas() else { return };
    let forms = all_forms();
    let mut problems = Vec::new();
    for target in Target::ALL {
        let mut by_version: BTreeMap<IsaVersion, Vec<&Form>> = BTreeMap::new();
        for form in forms.iter().filter(|f| f.inst().op.needs().target <= target) {
            by_version.entry(isa(form, target).max(target.isa())).or_default().push(form);
        }
        for (version, forms) in by_version {
            let (text, lines) = text(&forms, version, target);
            if let Err(PtxasError::Refused { messages, .. }) = ptxas.assemble_text(&text, target) {
                for message in messages {
                    let form = message.line.and_then(|l| lines.get(&l)).map(|f| f.text());
                    problems.push(format!("{target} {version}: {message} [{}]", form.unwrap_or_default()));
                }
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Those of the given forms that ptxas does not complain about.
fn accepted<'f>(ptxas: &Ptxas, forms: &[&'f Form], isa: IsaVersion, target: Target) -> Vec<&'f Form> {
    let (text, lines) = text(forms, isa, target);
    let refused: BTreeSet<usize> = match ptxas.assemble_text(&text, target) {
        Err(PtxasError::Refused { messages, .. }) => messages.iter().filter_map(|m| m.line).collect(),
        Err(error) => panic!("{error}"),
        Ok(_) => BTreeSet::new(),
    };
    let silent: Vec<&Form> = lines.iter().filter(|(l, _)| !refused.contains(l)).map(|(_, f)| *f).collect();
    if silent.len() == forms.len() && forms.len() > 1 {
        // A fatal message hides all others: ask for each by itself.
        return forms.iter().flat_map(|f| accepted(ptxas, &[f], isa, target)).collect();
    }
    if forms.len() > 1 && !silent.is_empty() && !refused.is_empty() {
        return silent.iter().flat_map(|f| accepted(ptxas, &[f], isa, target)).collect();
    }
    silent
}

#[test]
fn ptxas_refuses_every_form_one_version_earlier_than_the_table_states() {
    let Some(ptxas) = ptxas() else { return };
    let forms = all_forms();
    let mut problems = Vec::new();
    for pair in IsaVersion::ALL.windows(2) {
        let (earlier, version) = (pair[0], pair[1]);
        for target in Target::ALL.into_iter().filter(|t| t.isa() <= earlier) {
            // An arrival that returns the state is older than one that discards it; the table has one line for both.
            let older =
                |f: &Form| matches!(f.inst().op, Op::MbarrierArrive { .. }) && f.inst().dst != [Arg::Sink];
            let here = |f: &&Form| f.inst().op.needs() == Needs { isa: version, target } && !older(f);
            let forms: Vec<&Form> = forms.iter().filter(here).collect();
            if !forms.is_empty() {
                let too_new = accepted(&ptxas, &forms, earlier, target);
                problems.extend(too_new.iter().map(|f| format!("{target} {version}: {}", f.text())));
            }
        }
    }
    assert!(problems.is_empty(), "accepted one version earlier:\n{}", problems.join("\n"));
}

#[test]
fn ptxas_refuses_every_form_one_target_earlier_than_the_table_states() {
    let Some(ptxas) = ptxas() else { return };
    let forms = all_forms();
    let mut problems = Vec::new();
    for pair in Target::ALL.windows(2) {
        let (earlier, target) = (pair[0], pair[1]);
        let mut by_version: BTreeMap<IsaVersion, Vec<&Form>> = BTreeMap::new();
        for form in forms.iter().filter(|f| f.inst().op.needs().target == target) {
            by_version.entry(isa(form, target).max(earlier.isa())).or_default().push(form);
        }
        for (version, forms) in by_version {
            let too_new = accepted(&ptxas, &forms, version, earlier);
            problems.extend(too_new.iter().map(|f| format!("{earlier} (not {target}): {}", f.text())));
        }
    }
    assert!(problems.is_empty(), "accepted one target earlier:\n{}", problems.join("\n"));
}

#[test]
fn what_the_checker_takes_of_many_forms_together_ptxas_takes() {
    let Some(ptxas) = ptxas() else { return };
    let forms = all_forms();
    let mut taken = 0;
    // Strides that share no factor with the number of forms give every kernel a different mixture.
    for (start, stride) in [(0, 97), (1, 101), (2, 103), (3, 107), (4, 109), (5, 113), (6, 127), (7, 131)] {
        let mixture: Vec<&Form> = forms.iter().skip(start).step_by(stride).collect();
        let kernel = joined(&mixture);
        if check::kernel(&kernel, Target::Sm90a).is_empty() {
            let module = Module::new(Target::Sm90a).with(kernel);
            ptxas.assemble(&module, Target::Sm90a).unwrap_or_else(|error| panic!("{error}"));
            taken += 1;
        }
    }
    assert!(taken >= 4, "the checker takes only {taken} of 8 mixtures");
}

#[test]
fn the_checker_refuses_every_form_on_every_target_that_does_not_claim_it() {
    for form in all_forms() {
        let needs = form.inst().op.needs().target;
        for target in Target::ALL.into_iter().filter(|t| *t < needs) {
            let faults = check::kernel(&form.kernel, target);
            let refused = faults.iter().any(|e| {
                matches!(e.fault, Fault::Target { needs: n, .. } if n == needs) && e.loc == form.inst().loc
            });
            assert!(refused, "{target}: {}", form.text());
        }
    }
}

#[test]
fn a_modules_version_is_the_lowest_that_its_instructions_need() {
    let (mut k, x) = fixture("plain", Target::Sm80);
    k.nanosleep(x.r);
    let plain = Module::new(Target::Sm80).with(k.finish().expect("well formed"));
    assert_eq!(plain.isa(), IsaVersion::V7_0);

    let (mut k, x) = fixture("newer", Target::Sm80);
    k.mbarrier_arrive(x.bar);
    let newer = plain.with(k.finish().expect("well formed"));
    assert_eq!(newer.isa(), IsaVersion::V7_1);
    assert!(newer.to_string().starts_with(".version 7.1\n.target sm_80\n"));
}
