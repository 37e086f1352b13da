//! Faults of those who append to a cache: into the wrong rows, turned in the wrong way, or as the wrong codes of 8 bits.

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
    TimesDescale,
    NeighboursDescale,
    NotSaturated,
}

impl Miswrite {
    /// Each with whether it is about a cache of 8 bits.
    const ALL: [(Miswrite, bool, &'static str); 9] = [
        (Miswrite::WrongSlot, false, "new keys are appended one row too early"),
        (Miswrite::WrongPosition, false, "rotary embeddings are of the position before"),
        (Miswrite::WrongConvention, false, "rotary embeddings turn neighbours"),
        (Miswrite::NotTurned, false, "new keys and queries are not turned"),
        (Miswrite::RowTooMany, false, "the row behind the last new key is written too"),
        (Miswrite::WrongSlot, true, "codes of 8 bits are appended one row too early"),
        (Miswrite::TimesDescale, true, "new keys and values are multiplied by the descale"),
        (Miswrite::NeighboursDescale, true, "new keys and values have the descale of the next head"),
        (Miswrite::NotSaturated, true, "new keys and values beyond the largest code become NaN"),
    ];

    /// What is stored in the place of a number, for its descale and that of the next head.
    fn instead(self, stored: f32, [descale, next]: [f32; 2]) -> f32 {
        match self {
            Miswrite::TimesDescale => stored * descale * descale,
            Miswrite::NeighboursDescale => stored * descale / next,
            Miswrite::NotSaturated if stored.abs() == 448.0 => f32::NAN,
            _ => stored,
        }
    }

    /// Changes the new rows of a dense cache of 8 bits, which an engine has written rightly.
    fn change_codes(self, problem: &Problem, attention: &Attention<'_>, [k, v]: [&mut TensorMut<'_>; 2]) {
        let (descales, added) = (attention.given_descales(), problem.append.map_or(0, |append| append.len));
        let before = attention.host_key_lengths().unwrap_or_default();
        for (which, cache) in [(1, k), (2, v)] {
            let [_, heads, _, width] = cache.shape();
            let mut row = vec![0.0; width];
            for (entry, head) in (0..before.len()).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                for key in (before[entry] as usize..).take(added) {
                    let block = problem.descale_block(key);
                    let of = [head, (head + 1) % heads].map(|head| descales.at(entry, head, block)[which]);
                    cache.as_tensor().read_row(entry, head, key, &mut row);
                    for x in &mut row {
                        *x = self.instead(*x, of);
                    }
                    cache.write_row(entry, head, key, &row);
                }
            }
        }
    }
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
        if let Some(slip) = self.slip.filter(|_| problem.is_eight_bit() && problem.is_dense()) {
            slip.change_codes(&problem, attention, [&mut *k, &mut *v]);
        }
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
    let through = |slip, eight: Option<bool>| {
        let shows = move |Case { problem, .. }: &Case| {
            problem.append.is_some() && eight.is_none_or(|eight| eight == problem.is_eight_bit())
        };
        move || through_corpus(&Appends { slip }, shows)
    };
    let faults =
        Miswrite::ALL.map(|(slip, eight, name)| Trial::fault(name, JUDGE, through(Some(slip), Some(eight))));
    faults.into_iter().chain([Trial::honest("appends", JUDGE, through(None, None))]).collect()
}
