//! What a report says, before it is HTML or Markdown: blocks of text, tables and charts.

use super::chart::Chart;
use super::source::{Number, Style};

/// A piece of a line.
#[derive(Clone, Debug)]
pub enum Piece {
    /// Words.
    Text(String),
    /// Code, to be read letter by letter.
    Code(String),
    /// A number with its source.
    Number(Number, Style),
    /// The same for the best of a row.
    Best(Number, Style),
    /// An absent value, and the reason if it is known.
    Absent(String),
    /// An evidence file, by its place in the list of files.
    File(usize),
}

/// A cell of a table, or a paragraph.
pub type Line = Vec<Piece>;

/// Words as a line.
pub fn text(words: impl Into<String>) -> Line {
    vec![Piece::Text(words.into())]
}

/// Something to be read letter by letter, as a line.
pub fn code(words: impl Into<String>) -> Line {
    vec![Piece::Code(words.into())]
}

/// A number, or that it is absent.
pub fn number(number: Option<Number>, style: Style) -> Line {
    vec![number.map_or_else(|| Piece::Absent(String::new()), |number| Piece::Number(number, style))]
}

/// An interval as `low–high`, or that it is absent.
pub fn interval(low: Option<Number>, high: Option<Number>, style: Style) -> Line {
    match (low, high) {
        (Some(low), Some(high)) => {
            vec![Piece::Number(low, style), Piece::Text("–".into()), Piece::Number(high, style)]
        }
        _ => vec![Piece::Absent(String::new())],
    }
}

/// A table.
#[derive(Clone, Debug)]
pub struct Table {
    /// What it shows.
    pub caption: String,
    /// The headings; those of columns of numbers are marked.
    pub head: Vec<(String, bool)>,
    /// The rows, each with as many cells as there are headings; the first is the row's own heading.
    pub rows: Vec<Vec<Line>>,
}

impl Table {
    /// An empty table; a heading that begins with `#` is that of a column of numbers.
    pub fn new(caption: impl Into<String>, head: &[&str]) -> Self {
        let heading = |name: &&str| match name.strip_prefix('#') {
            Some(name) => (name.to_string(), true),
            None => ((*name).to_string(), false),
        };
        Self { caption: caption.into(), head: head.iter().map(heading).collect(), rows: Vec::new() }
    }
}

/// A large number with a few words.
#[derive(Clone, Debug)]
pub struct Tile {
    /// The number.
    pub number: Number,
    /// How it is written.
    pub style: Style,
    /// What it is.
    pub label: Line,
}

/// A part of a section.
#[derive(Clone, Debug)]
pub enum Block {
    /// A paragraph.
    Text(Line),
    /// Large numbers.
    Tiles(Vec<Tile>),
    /// A table.
    Table(Table),
    /// A table that is shown on request.
    Folded(String, Table),
    /// A chart with the table of what it draws beside it.
    Figure(Chart, Table),
    /// Small tables side by side.
    Tables(Vec<Table>),
}

/// A part of the report with a heading of its own.
#[derive(Clone, Debug)]
pub struct Section {
    /// Its name in links.
    pub id: &'static str,
    /// Its heading.
    pub title: String,
    /// What it says.
    pub blocks: Vec<Block>,
}

/// A whole report.
#[derive(Clone, Debug)]
pub struct Page {
    /// Its title.
    pub title: String,
    /// What it was measured on, in a line.
    pub lead: Line,
    /// Its sections.
    pub sections: Vec<Section>,
}
