//! Faults of those who look up where sequences lie: in starts, in tables of pages, and at the ends of sequences.

use std::sync::OnceLock;

use flashcore::cpu::{self, Engine as Cpu};
use flashcore::{Attention, Backward, Device, Keys, Pages, Problem, Starts, Tensor, TensorMut};

use super::Trial;
use super::hidden::{JUDGE, through_corpus};
use super::results::verdict;
use crate::cases::{Case, corpus};
use crate::check::Prepared;
use crate::engine::Engine;

/// Rows of a tile that is written whole.
const TILE: usize = 64;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slip {
    PageSkipped,
    PagesSwapped,
    LengthOffByOne,
    StalePage,
    TileBeyond,
    StartsOfAnother,
}

impl Slip {
    const ALL: [(Slip, &'static str); 6] = [
        (Slip::PageSkipped, "the second page of a sequence is skipped"),
        (Slip::PagesSwapped, "the last two pages of a sequence are swapped"),
        (Slip::LengthOffByOne, "the last key of a full page is left out"),
        (Slip::StalePage, "the last page of a sequence is one that was freed"),
        (Slip::TileBeyond, "a tile writes into the next sequence"),
        (Slip::StartsOfAnother, "keys are those of the next sequence"),
    ];
}

/// An engine for packed and paged calls, right or with a slip.
struct Misplaced {
    slip: Option<Slip>,
}

/// The numbers of starts or of a table.
fn numbers(tensor: &Tensor<'_>) -> Vec<i32> {
    tensor.to_f32().into_iter().map(|x| x as i32).collect()
}

impl Misplaced {
    /// The table as it is read, for sequences with so many keys.
    fn table(&self, problem: &Problem, mut table: Vec<i32>, lengths: &[u32]) -> Vec<i32> {
        let Keys::Paged { page, pages } = problem.keys else { return table };
        let width = problem.len_k.div_ceil(page);
        let used = |len: &u32| (*len as usize).div_ceil(page);
        let mut taken = vec![false; pages];
        for (row, len) in table.chunks_exact(width).zip(lengths) {
            row[..used(len)].iter().for_each(|&page| taken[page as usize] = true);
        }
        let freed = taken.iter().position(|taken| !taken).unwrap_or(0) as i32;
        for (row, len) in table.chunks_exact_mut(width).zip(lengths) {
            let row = &mut row[..used(len)];
            let last = row.len().saturating_sub(1);
            match self.slip {
                Some(Slip::PageSkipped) if last > 1 => row.copy_within(2.., 1),
                Some(Slip::PagesSwapped) if last > 0 => row.swap(last - 1, last),
                Some(Slip::StalePage) if !row.is_empty() => row[last] = freed,
                _ => {}
            }
        }
        table
    }
}

impl Misplaced {
    /// The starts of keys as they are read.
    fn take_anothers(&self, keys_of: &mut [i32]) {
        if self.slip == Some(Slip::StartsOfAnother) && !keys_of.is_empty() {
            keys_of.rotate_left(1);
            let last = keys_of.len() - 1;
            keys_of[last] = keys_of[last.saturating_sub(1)];
        }
    }
}

impl Engine for Misplaced {
    fn name(&self) -> &'static str {
        "misplaced"
    }

    fn supports(&self, _: &Problem) -> Result<(), String> {
        Ok(())
    }

    fn takes_sequences(&self) -> bool {
        true
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let problem = attention.problem(q, k, v)?;
        let mut lengths = attention.host_key_lengths().unwrap_or_default().to_vec();
        let mut called = *attention;
        let [of_q, of_k] = attention.given_starts();
        let table =
            attention.given_pages().map(|pages| self.table(&problem, numbers(&pages.table()), &lengths));
        let table = table.map(|table| (table, problem.len_k.div_ceil(page(&problem))));
        let view = table.as_ref().map(|(table, width)| Tensor::indices(table, [problem.batch, *width]));
        if let Some(view) = view.transpose()? {
            called = called.paged(Pages::new(&view).with_most_keys(problem.len_k));
        }
        let mut keys_of = of_k.map_or_else(Vec::new, |starts| numbers(&starts.tensor()));
        self.take_anothers(&mut keys_of);
        let starts = of_k.map(|_| Tensor::indices(&keys_of, [1, keys_of.len()])).transpose()?;
        if let Some(starts) = &starts {
            let apart = matches!(problem.keys, Keys::Apart { .. });
            let of = if apart { Starts::apart } else { Starts::of };
            called = called.packed_keys(of(starts, problem.len_k));
        }
        if self.slip == Some(Slip::LengthOffByOne) {
            let full = |len: &&mut u32| **len > 0 && (**len as usize).is_multiple_of(page(&problem));
            lengths.iter_mut().filter(full).for_each(|len| *len -= 1);
        }
        if problem.key_lengths {
            called = called.key_lengths(&lengths);
        }
        let engine = Cpu::new().with_isa(cpu::Isa::Portable)?;
        called.run_into(&Device::cpu_with(engine), q, k, v, o, lse)?;
        if let (Some(Slip::TileBeyond), Some(starts)) = (self.slip, of_q) {
            write_beyond(o, &numbers(&starts.tensor()));
        }
        Ok(())
    }

    fn differentiates(&self) -> bool {
        true
    }

    fn differentiate(
        &self,
        attention: &Attention<'_>,
        given: &Backward<'_>,
        [dq, dk, dv]: [&mut TensorMut<'_>; 3],
    ) -> flashcore::Result<()> {
        let problem = attention.backward_problem(given)?;
        let [of_q, of_k] = attention.given_starts().map(|starts| starts.map(|it| numbers(&it.tensor())));
        let mut called = *attention;
        let mut keys_of = of_k.clone().unwrap_or_default();
        self.take_anothers(&mut keys_of);
        let starts = of_k.as_ref().map(|_| Tensor::indices(&keys_of, [1, keys_of.len()])).transpose()?;
        if let Some(starts) = &starts {
            called = called.packed_keys(Starts::of(starts, problem.len_k));
        }
        let engine = Cpu::new().with_isa(cpu::Isa::Portable)?;
        called.backward_into(&Device::cpu_with(engine), given, dq, dk, dv)?;
        if self.slip == Some(Slip::TileBeyond) {
            for (gradient, starts) in [(dq, &of_q), (dk, &of_k), (dv, &of_k)] {
                if let Some(starts) = starts {
                    write_beyond(gradient, starts);
                }
            }
        }
        Ok(())
    }
}

/// Writes the last row of each sequence over the rows that follow in its tile.
fn write_beyond(tensor: &mut TensorMut<'_>, starts: &[i32]) {
    let [_, heads, total, width] = tensor.shape();
    let mut row = vec![0.0; width];
    for ends in starts.windows(2).filter(|ends| ends[0] < ends[1]) {
        let (first, end) = (ends[0] as usize, ends[1] as usize);
        let beyond = (first + (end - first).next_multiple_of(TILE)).min(total);
        for head in 0..heads {
            tensor.as_tensor().read_row(0, head, end - 1, &mut row);
            (end..beyond).for_each(|at| tensor.write_row(0, head, at, &row));
        }
    }
}

/// Keys of a page.
fn page(problem: &Problem) -> usize {
    match problem.keys {
        Keys::Paged { page, .. } => page,
        _ => usize::MAX,
    }
}

/// A backward pass over sequences of any lengths. The oracle is asked about it only once.
fn packed_gradients() -> &'static Prepared {
    static PREPARED: OnceLock<Prepared> = OnceLock::new();
    PREPARED.get_or_init(|| {
        let case = corpus().into_iter().find(|case| case.name == "packed/uneven-small-d64");
        Prepared::new(case.and_then(|case| case.backward()).expect("a case of the corpus"))
    })
}

/// Every trial.
pub fn trials() -> Vec<Trial> {
    let placed =
        |case: &Case| !case.problem.is_dense() && case.wild.is_none() && case.problem.append.is_none();
    let through = |slip| move || through_corpus(&Misplaced { slip }, placed);
    let faults = Slip::ALL.map(|(slip, name)| Trial::fault(name, JUDGE, through(Some(slip))));
    let honest = Trial::honest("packed sequences and keys in pages", JUDGE, through(None));
    let backward = |slip| move || verdict(packed_gradients(), &Misplaced { slip });
    let of_gradients = [
        (Slip::TileBeyond, "a tile of gradients writes into the next sequence"),
        (Slip::StartsOfAnother, "gradients are those of the next sequence's keys"),
    ];
    let of_gradients = of_gradients.map(|(slip, name)| Trial::fault(name, JUDGE, backward(Some(slip))));
    let right = Trial::honest("gradients of packed sequences", JUDGE, backward(None));
    faults.into_iter().chain([honest]).chain(of_gradients).chain([right]).collect()
}
