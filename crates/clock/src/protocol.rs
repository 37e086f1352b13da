//! What a worker is asked. A request is one line of JSON, and so is its reply; `{"error": …}` is a refusal.

use std::path::PathBuf;

use flashcore::{Keys, Mask, Name, Pass, Problem, Queries};
use serde::{Deserialize, Serialize};

use crate::sequences::Sequences;

/// One request.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Who are you? Answered with versions and the GPU.
    Hello,
    /// Read a pool of inputs; answered with the checksums of what was read.
    Pool {
        /// Its dtype.
        dtype: String,
        /// The files of q, k and v.
        paths: [PathBuf; 3],
    },
    /// Get ready for a problem with this many sets of tensors; element `i` of a tensor is the pool's `i mod len`.
    Load {
        /// What is asked.
        problem: Asked,
        /// Sets of tensors that calls use in turn.
        sets: usize,
    },
    /// Make the first call of the problem, and say how long it took until it was done.
    First {
        /// Whose attention.
        who: String,
    },
    /// Compute into poisoned memory, and write the elements of some rows to a file: of o, or of the gradient of q.
    Output {
        /// Whose attention.
        who: String,
        /// Rows in the order (batch, head, query).
        rows: Vec<usize>,
        /// Where to.
        path: PathBuf,
    },
    /// One sample of the kernel clock: `warm` untimed replays, then `replays` timed ones, of a graph of at least
    /// `calls` calls, without a pause.
    Sample {
        /// Whose attention.
        who: String,
        /// Untimed replays before it.
        warm: u32,
        /// The fewest calls of the graph.
        calls: u32,
        /// Timed replays.
        #[serde(default = "once")]
        replays: u32,
    },
    /// Samples of the call clock, each with the host's time.
    Calls {
        /// Whose attention.
        who: String,
        /// How many samples.
        calls: u32,
    },
    /// Whether a replayed call gives the same bits as a direct one.
    Check {
        /// Whose attention.
        who: String,
    },
    /// The plan chosen for the problem. FlashCore's worker only.
    Plan {
        /// Whose attention.
        who: String,
    },
    /// The GPU's peak rates: products, copies, exponentials, launches. FlashCore's worker only.
    Ceilings,
    /// Import a library that is timed beside torch, and say its version. torch only.
    Version {
        /// Whose attention.
        who: String,
    },
    /// The rate of a large matrix product, in TFLOP/s. torch only.
    Matmul {
        /// The dtype.
        dtype: String,
    },
}

fn once() -> u32 {
    1
}

/// Where the gradient of o begins in q's pool: far from what q itself has there.
pub const GRADIENT_FROM: usize = 7_654_321;

/// A problem as it goes over the wire: as its text, and in fields for those who read no such text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Asked {
    /// The text, which says everything.
    pub text: String,
    /// The dtype.
    pub dtype: String,
    /// (batch, heads, length, head_dim) of q.
    pub q: [usize; 4],
    /// The same of k.
    pub k: [usize; 4],
    /// The same of v.
    pub v: [usize; 4],
    /// Whether a query sees only keys up to its own position.
    pub causal: bool,
    /// What scores are multiplied by.
    pub scale: f32,
    /// Backward: element `i` of the gradient of o is element `i` plus this of q's pool. Absent forward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_from: Option<usize>,
    /// Backward: a call computes o and lse first, rather than being given them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub forward_too: bool,
    /// Sequences of lengths of their own. q, k and v are then as they lie in memory: (batch, heads, length, head_dim) of
    /// what is packed, or of the cache whose pages the keys are in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequences: Option<Sequences>,
    /// The pages of each sequence, row by row, where its keys are in pages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub table: Vec<u32>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature.
fn is_false(it: &bool) -> bool {
    !it
}

impl Asked {
    /// The problem on the wire.
    pub fn of(problem: &Problem) -> Self {
        let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, .. } = *problem;
        Self {
            text: problem.to_string(),
            dtype: problem.dtype.name().into(),
            q: [batch, heads_q, len_q, head_dim],
            k: [batch, heads_kv, len_k, head_dim],
            v: [batch, heads_kv, len_k, head_dim_v],
            // One query sees every key, which torch's is_causal would not say.
            causal: problem.mask == Mask::Causal && len_q > 1,
            scale: problem.scale,
            gradient_from: (problem.pass == Pass::Backward).then_some(GRADIENT_FROM),
            forward_too: false,
            sequences: None,
            table: Vec::new(),
        }
    }

    /// The problem of some sequences on the wire.
    pub fn of_sequences(problem: &Problem, sequences: &Sequences) -> Self {
        let mut asked = Self { table: sequences.table(problem), ..Self::of(problem) };
        if let Queries::Packed { total } = problem.queries {
            (asked.q[0], asked.q[2]) = (1, total);
        }
        if let Keys::Packed { total } = problem.keys {
            for shape in [&mut asked.k, &mut asked.v] {
                (shape[0], shape[2]) = (1, total);
            }
        }
        asked.sequences = Some(sequences.clone());
        asked
    }

    /// The output whose rows are judged, and the elements of one.
    pub fn judged(&self) -> (Name, usize) {
        match self.gradient_from {
            None => (Name::O, self.v[3]),
            Some(_) => (Name::Dq, self.q[3]),
        }
    }

    /// The problem that was meant.
    pub fn problem(&self) -> Result<Problem, String> {
        self.text.parse().map_err(|error: flashcore::Error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use flashcore::DType;

    use super::*;

    #[test]
    fn a_problem_comes_back_from_the_wire_as_it_was() {
        let plain = Problem::new(2, 8, 33, 64, DType::BF16).with_kv(2, 70).with_mask(Mask::Causal);
        let window = Mask::Window { left: Some(7), right: None };
        for problem in [
            plain,
            plain.with_mask(Mask::CausalTopLeft).with_softcap(30.0).with_key_lengths(),
            plain.with_mask(window).with_scale(0.1).with_head_dim_v(32).with_lse(),
            plain.backward(),
        ] {
            let request = Request::Load { problem: Asked::of(&problem), sets: 3 };
            let line = serde_json::to_string(&request).unwrap();
            let Ok(Request::Load { problem: asked, sets: 3 }) = serde_json::from_str(&line) else {
                panic!("{line}")
            };
            assert_eq!(asked.problem(), Ok(problem));
        }
    }
}
