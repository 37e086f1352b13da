//! What the sections read from evidence: benchmarks, their cells, and who was measured in them.

use super::page::{Line, Piece};
use super::source::{Evidence, Field, Number, Style};

/// A benchmark's evidence, of a GPU or of a CPU.
#[derive(Clone, Debug)]
pub struct Bench<'a> {
    /// The whole file.
    pub root: Field<'a>,
    /// Its cells.
    pub cells: Vec<Cell<'a>>,
}

impl<'a> Bench<'a> {
    /// The benchmarks among files.
    pub fn all(files: &'a [Evidence]) -> Vec<Self> {
        let is_bench = |schema: Option<&str>| {
            schema.is_some_and(|name| {
                name.starts_with("flashcore.bench/") || name.starts_with("flashcore.bench-gpu/")
            })
        };
        let roots = (0..files.len()).map(|file| Field::root(files, file));
        roots
            .filter(|root| is_bench(root.get("schema").text()))
            .map(|root| Self {
                cells: root.get("cells").items().into_iter().filter_map(Cell::read).collect(),
                root,
            })
            .collect()
    }

    /// What it was measured on.
    pub fn device(&self) -> Option<&'a str> {
        self.root.get("gpu").get("ours").get("device").text().or_else(|| self.root.get("device").text())
    }

    /// The pass of its cells, where it is not the forward one.
    pub fn pass(&self) -> Option<&'a str> {
        self.cells.first().and_then(Cell::pass)
    }

    /// How long a GPU's samples are: `bursts` or `sustained`; older files, which hold bursts, do not say.
    pub fn regime(&self) -> Option<&'a str> {
        self.root.get("regime").text()
    }

    /// The clock, the cache mode and the regime of the times.
    pub fn conditions(&self) -> String {
        let clock = self.root.get("clock").text().map(|clock| format!("{clock} clock"));
        let cache = self.root.get("cache").text().map(|cache| format!("{cache} cache"));
        [clock, cache, self.regime().map(String::from)].into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

/// One cell of a benchmark.
#[derive(Clone, Debug)]
pub struct Cell<'a> {
    /// Its place.
    pub field: Field<'a>,
    /// As BxHxSxD.
    pub shape: &'a str,
    /// The dtype.
    pub dtype: &'a str,
    /// The mask.
    pub mask: &'a str,
}

impl<'a> Cell<'a> {
    fn read(field: Field<'a>) -> Option<Self> {
        let text = |key: &str| field.get(key).text();
        let (shape, dtype, mask) = (text("shape")?, text("dtype")?, text("mask")?);
        Some(Self { field, shape, dtype, mask })
    }

    /// As `1x8x512x64 f16 causal`.
    pub fn label(&self) -> String {
        let behind = |text: Option<&str>| text.map_or_else(String::new, |text| format!(" {text}"));
        let (pass, layout) = (behind(self.pass()), behind(self.field.get("layout").text()));
        format!("{} {} {}{pass}{layout}", self.shape, self.dtype, self.mask)
    }

    /// The pass, where it is not the forward one.
    pub fn pass(&self) -> Option<&'a str> {
        self.field.get("pass").text()
    }

    /// Its length as text, with the number that it begins with.
    pub fn length(&self) -> Option<(u64, &'a str)> {
        let length = self.shape.split('x').nth(2)?;
        Some((length.split('/').next()?.parse().ok()?, length))
    }

    /// Its head dimension as text.
    pub fn head_dim(&self) -> Option<&'a str> {
        self.shape.split('x').nth(3)
    }

    /// Who was measured.
    pub fn names(&self) -> Vec<String> {
        self.field
            .get("results")
            .items()
            .iter()
            .filter_map(|r| r.get("name").text().map(String::from))
            .collect()
    }

    /// What was measured of a contender.
    pub fn result(&self, name: &str) -> Option<Field<'a>> {
        self.field.get("results").items().into_iter().find(|result| result.get("name").text() == Some(name))
    }

    /// A number of a contender.
    pub fn number(&self, name: &str, key: &str) -> Option<Number> {
        self.result(name)?.get(key).number()
    }

    /// The comparison of ours with a peer.
    pub fn comparison(&self, peer: &str) -> Option<Field<'a>> {
        self.field.get("comparisons").items().into_iter().find(|found| found.get("peer").text() == Some(peer))
    }

    /// A number of a contender as it stands in a table: marked when it is the best, and with the reason when there
    /// is none.
    pub fn line(&self, name: &str, key: &str, best: Option<f64>) -> Line {
        let Some(result) = self.result(name) else { return vec![Piece::Absent("not measured".into())] };
        vec![match result.get(key).number() {
            Some(number) if best == Some(number.value()) => Piece::Best(number, Style::Digits),
            Some(number) => Piece::Number(number, Style::Digits),
            None => Piece::Absent(result.get("failure").text().unwrap_or_default().to_string()),
        }]
    }

    /// The speed-up over a peer with its interval and verdict.
    pub fn speed_up(&self, peer: &str) -> Line {
        self.comparison(peer).map_or_else(|| vec![Piece::Absent(String::new())], |found| comparison(&found))
    }
}

/// A comparison: the ratio, its interval, the verdict.
pub fn comparison(found: &Field<'_>) -> Line {
    let interval = found.get("interval");
    match (found.get("speed_up").number(), interval.get("low").number(), interval.get("high").number()) {
        (Some(ratio), Some(low), Some(high)) => vec![
            Piece::Number(ratio, Style::Ratio),
            Piece::Text(" [".into()),
            Piece::Number(low, Style::Fine),
            Piece::Text(", ".into()),
            Piece::Number(high, Style::Fine),
            Piece::Text(format!("] {}", found.get("verdict").text().unwrap_or_default())),
        ],
        _ => vec![Piece::Absent(String::new())],
    }
}

/// What the confidence of the intervals is, by the first comparison that there is.
pub fn interval_level(benches: &[Bench<'_>]) -> Option<Number> {
    let mut all =
        benches.iter().flat_map(|bench| &bench.cells).flat_map(|c| c.field.get("comparisons").items());
    all.find_map(|found| found.get("interval").get("level").number())
}
