//! Faults of those who append to a cache: into the wrong rows, or turned in the wrong way.

use flashcore::{Append, Attention, Device, Problem, Tensor, TensorMut};

use super::Trial;
use super::hidden::{JUDGE, through_corpus};
use crate::cases::Case;
use crate::engine::Engine;

/// What goes wrong with an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Miswrite {
    WrongSlot,
    WrongPosition,
    WrongConvention,
    NotTurned,
    RowTooMany,
}

impl Miswrite {
    const ALL: [(Miswrite, &'static str); 5] = [
        (Miswrite::WrongSlot, "new keys are appended one row too early"),
        (Miswrite::WrongPosition, "rotary embeddings are of the position before"),
        (Miswrite::WrongConvention, "rotary embeddings turn neighbours"),
        (Miswrite::NotTurned, "new keys and queries are not turned"),
        (Miswrite::RowTooMany, "the row behind the last new key is written too"),
    ];
}

/// An engine that appends, right or with a slip.
struct Appends {
    slip: Option<Miswrite>,
}

impl Engine for Appends {
    fn name(&self) -> &'static str {
        "appends"
    }

    fn supports(&self, _: &Problem) -> Result<(), String> {
        Ok(())
    }

    fn takes_sequences(&self) -> bool {
        true
    }

    fn appends(&self) -> bool {
        true
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        attention.run_into(&Device::cpu(), q, k, v, o, lse)
    }

    fn append(
        &self,
        attention: &Attention<'_>,
        new: &Append<'_>,
        q: &Tensor<'_>,
        [k, v]: [&mut TensorMut<'_>; 2],
        (o, lse): (&mut TensorMut<'_>, Option<&mut TensorMut<'_>>),
    ) -> flashcore::Result<()> {
        let problem = attention.append_problem(new, q, &k.as_tensor(), &v.as_tensor())?;
        let before = attention.host_key_lengths().unwrap_or_default();
        let earlier: Vec<u32> = before.iter().map(|len| len.saturating_sub(1)).collect();
        let positions = Tensor::indices(&earlier, [1, earlier.len()])?;
        let (mut called, mut new) = (*attention, *new);
        match (self.slip, new.given_rotary()) {
            (Some(Miswrite::WrongSlot), _) => called = called.key_lengths(&earlier),
            (Some(Miswrite::WrongPosition), Some(rotary)) => new = new.rotary(rotary.positions(&positions)),
            (Some(Miswrite::WrongConvention), Some(rotary)) => new = new.rotary(rotary.interleaved()),
            (Some(Miswrite::NotTurned), Some(_)) => new = new.without_rotary(),
            _ => {}
        }
        called.append_into(&Device::cpu(), &new, q, k, v, o, lse)?;
        if self.slip == Some(Miswrite::RowTooMany) && problem.is_dense() {
            let mut row = vec![0.0; problem.head_dim];
            let added = problem.append.map_or(0, |append| append.len);
            for (entry, len) in before.iter().enumerate() {
                let end = *len as usize + added;
                if end < problem.len_k && end > 0 {
                    k.as_tensor().read_row(entry, 0, end - 1, &mut row);
                    k.write_row(entry, 0, end, &row);
                }
            }
        }
        Ok(())
    }
}

/// Every trial.
pub fn trials() -> Vec<Trial> {
    let through =
        |slip| move || through_corpus(&Appends { slip }, |case: &Case| case.problem.append.is_some());
    let faults = Miswrite::ALL.map(|(slip, name)| Trial::fault(name, JUDGE, through(Some(slip))));
    faults.into_iter().chain([Trial::honest("appends", JUDGE, through(None))]).collect()
}
