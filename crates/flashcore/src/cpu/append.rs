//! New keys and values, and rotary embeddings: what a step of decoding does before it attends.

use rayon::prelude::*;

use crate::{
    Descales, Layout, Name, Problem, Result, TensorBuf, TensorMut, Turning, append::lengths_after,
    contract::Call, descales::to_store, layouts::Lie, tensor::Raw,
};

/// Rows of queries that are worth a task of their own.
const ROWS_PER_TASK: usize = 64;

/// Computes a call that appends with an engine that only attends.
pub(super) fn run(call: &Call<'_>, engine: impl FnOnce(&Call<'_>) -> Result<()>) -> Result<()> {
    let Some(append) = call.problem.append else { return engine(call) };
    let before = call.key_lengths.unwrap_or_default();
    let after = lengths_after(&call.problem, &call.tensors, before);
    let turned = append.rotary.map(|turning| Angles::of(turning, call, before));
    write(call, before, &after, turned.as_ref());
    let mut tensors = call.tensors;
    let q = turned.map(|angles| turned_queries(call, &angles)).transpose()?;
    if let Some(q) = &q {
        tensors.set(Name::Q, q.view().raw);
    }
    engine(&Call { problem: call.problem.appended(), tensors, key_lengths: Some(&after), ..*call })
}

/// The angles of a call: its tables, and where each sequence begins in them.
struct Angles<'a> {
    turning: Turning,
    cos: &'a Raw,
    sin: &'a Raw,
    first: &'a [u32],
}

impl<'a> Angles<'a> {
    fn of(turning: Turning, call: &'a Call<'_>, before: &'a [u32]) -> Self {
        let first = call.tensors.get(Name::Positions).map_or(before, Raw::indices);
        Self { turning, cos: &call.tensors[Name::Cos], sin: &call.tensors[Name::Sin], first }
    }

    /// Turns a row that is so many behind its sequence's first. `cos` and `sin` are room for the angles.
    fn turn(&self, sequence: usize, row: usize, elements: &mut [f32], [cos, sin]: [&mut [f32]; 2]) {
        let position = self.first[sequence] as usize + row;
        self.cos.read_row(0, 0, position, cos);
        self.sin.read_row(0, 0, position, sin);
        self.turning.turn(elements, cos, sin);
    }

    /// Room for the elements that are turned, and for a cosine and a sine for each two of them.
    fn room(&self) -> [Vec<f32>; 3] {
        let dim = self.turning.dim;
        [dim, dim / 2, dim / 2].map(|len| vec![0.0; len])
    }

    /// Copies a row, and turns it.
    fn copy(
        &self,
        (from, at): (&Raw, [usize; 3]),
        (to, place): (&Raw, [usize; 3]),
        [sequence, row]: [usize; 2],
        [elements, cos, sin]: &mut [Vec<f32>; 3],
    ) {
        from.copy_row(at, to, place);
        from.read_row(at[0], at[1], at[2], elements);
        self.turn(sequence, row, elements, [cos, sin]);
        TensorMut::of(*to).write_row(place[0], place[1], place[2], elements);
    }
}

/// The codes of a cache of f8.
struct Codes<'a> {
    problem: &'a Problem,
    descales: Descales<'a>,
}

impl Codes<'_> {
    /// Writes a row of keys or values, whose numbers are those of `elements`, which it changes, under the descale of the
    /// sequence's key.
    fn write(
        &self,
        (to, place): (&Raw, [usize; 3]),
        which: Name,
        [sequence, key]: [usize; 2],
        elements: &mut [f32],
    ) {
        let block = self.problem.descale_block(key);
        let [_, of_k, of_v] = self.descales.at(sequence, place[1], block);
        let descale = if which == Name::K { of_k } else { of_v };
        for x in &mut *elements {
            *x = to_store(*x, descale);
        }
        TensorMut::of(*to).write_row(place[0], place[1], place[2], elements);
    }
}

/// Writes the new keys and values. Each head is written by one thread, so that two sequences with the same rows do no harm.
fn write(call: &Call<'_>, before: &[u32], after: &[u32], angles: Option<&Angles<'_>>) {
    let lie = Lie::of_keys(&call.problem, &call.tensors);
    let starts = call.tensors.get(Name::NewStarts).map(Raw::indices);
    let new = starts.map_or(Lie::Dense, Lie::Packed);
    let [new_k, new_v, k, v] = [Name::NewK, Name::NewV, Name::K, Name::V].map(|name| &call.tensors[name]);
    let problem = &call.problem;
    let codes = problem.is_eight_bit().then(|| Codes { problem, descales: Descales::among(&call.tensors) });
    (0..problem.heads_kv).into_par_iter().for_each(|head| {
        let mut room = angles.map(Angles::room);
        let [mut key, mut value] = [problem.head_dim, problem.head_dim_v].map(|dim| vec![0.0; dim]);
        for (sequence, (&before, &after)) in before.iter().zip(after).enumerate() {
            for row in 0..(after - before) as usize {
                let of_head = |[entry, row]: [usize; 2]| [entry, head, row];
                let from = of_head(new.place(sequence, row));
                let at = before as usize + row;
                let to = of_head(lie.place(sequence, at));
                if let Some(codes) = &codes {
                    for (of, elements) in [(new_k, &mut key), (new_v, &mut value)] {
                        of.read_row(from[0], from[1], from[2], elements);
                    }
                    if let (Some(angles), Some([_, cos, sin])) = (angles, &mut room) {
                        angles.turn(sequence, row, &mut key, [cos, sin]);
                    }
                    codes.write((k, to), Name::K, [sequence, at], &mut key);
                    codes.write((v, to), Name::V, [sequence, at], &mut value);
                    continue;
                }
                new_v.copy_row(from, v, to);
                match (angles, &mut room) {
                    (Some(angles), Some(room)) => {
                        angles.copy((new_k, from), (k, to), [sequence, row], room);
                    }
                    _ => new_k.copy_row(from, k, to),
                }
            }
        }
    });
}

/// The queries, turned, in memory of their own.
fn turned_queries(call: &Call<'_>, angles: &Angles<'_>) -> Result<TensorBuf> {
    let (q, problem) = (&call.tensors[Name::Q], &call.problem);
    let mut turned = TensorBuf::zeros(q.dtype, Layout::bhsd(q.layout.shape))?;
    let to = turned.view_mut().raw;
    let (lie, sequences) = (Lie::of_queries(problem, &call.tensors), call.sequences());
    let heads = problem.heads_q;
    (0..problem.batch * heads).into_par_iter().for_each(|i| {
        let (sequence, head) = (i / heads, i % heads);
        (0..sequences.queries(sequence)).into_par_iter().with_min_len(ROWS_PER_TASK).for_each_init(
            || angles.room(),
            |room, row| {
                let [entry, at] = lie.place(sequence, row);
                let ahead = if problem.turns_by_row() { row } else { 0 };
                angles.copy((q, [entry, head, at]), (&to, [entry, head, at]), [sequence, ahead], room);
            },
        );
    });
    Ok(turned)
}
