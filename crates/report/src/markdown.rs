//! The twin of the page in Markdown: the same words and tables, without the charts. Every number is a link; where the
//! links lead stands at the end, so that tables stay readable as text.

use std::fmt::Write;

use super::page::{Block, Line, Page, Piece, Table};
use super::register::Register;
use super::source::{Evidence, Number, Origin};

/// The page as Markdown; its charts are in the file that is named.
pub fn render(page: &Page, files: &[Evidence], with_charts: &str) -> String {
    let mut md = Markdown { files, out: String::new(), register: Register::default() };
    let lead = md.line(&page.lead);
    let _ =
        write!(md.out, "# {}\n\n{lead}\n\nThe charts are in [{with_charts}]({with_charts}).\n", page.title);
    for section in &page.sections {
        let _ = write!(md.out, "\n## {}\n", section.title);
        for block in &section.blocks {
            md.block(block);
        }
    }
    md.evidence();
    md.out
}

struct Markdown<'a> {
    files: &'a [Evidence],
    out: String,
    register: Register,
}

impl Markdown<'_> {
    fn block(&mut self, block: &Block) {
        match block {
            Block::Text(line) => {
                let line = self.line(line);
                let _ = write!(self.out, "\n{line}\n");
            }
            Block::Tiles(tiles) => {
                self.out.push('\n');
                for tile in tiles {
                    let number = self.piece(&Piece::Best(tile.number.clone(), tile.style));
                    let label = self.line(&tile.label);
                    let _ = writeln!(self.out, "- {number} {label}");
                }
            }
            Block::Table(table) | Block::Folded(_, table) | Block::Figure(_, table) => self.table(table),
            Block::Tables(tables) => tables.iter().for_each(|table| self.table(table)),
        }
    }

    fn table(&mut self, table: &Table) {
        if table.rows.is_empty() {
            return;
        }
        let _ = write!(self.out, "\n**{}**\n\n", escape(&table.caption));
        let names: Vec<String> = table.head.iter().map(|(name, _)| escape(name)).collect();
        let rules: Vec<&str> =
            table.head.iter().map(|(_, numeric)| if *numeric { "--:" } else { "---" }).collect();
        let _ = write!(self.out, "| {} |\n| {} |\n", names.join(" | "), rules.join(" | "));
        for row in &table.rows {
            let cells: Vec<String> = row.iter().map(|cell| self.line(cell)).collect();
            let _ = writeln!(self.out, "| {} |", cells.join(" | "));
        }
    }

    fn line(&mut self, line: &Line) -> String {
        line.iter().map(|piece| self.piece(piece)).collect()
    }

    fn piece(&mut self, piece: &Piece) -> String {
        match piece {
            Piece::Text(words) => escape(words),
            Piece::Code(words) => format!("`{}`", words.replace('|', "\\|")),
            Piece::Number(number, style) => {
                format!("[{}][{}]", style.write(number), self.register.name(number))
            }
            Piece::Best(number, style) => {
                format!("**[{}][{}]**", style.write(number), self.register.name(number))
            }
            Piece::Absent(why) if why.is_empty() => "*absent*".into(),
            Piece::Absent(why) => format!("*absent ({})*", escape(why)),
            Piece::File(file) => format!("[{}]({})", self.files[*file].short_name(), self.files[*file].link),
        }
    }

    fn evidence(&mut self) {
        self.out.push_str(
            "\n## Evidence\n\nEvery number is a link to its file; behind # stands the field as a JSON pointer, and the title is \
             its value as it stands there.\n\n| file | BLAKE3 |\n| --- | --- |\n",
        );
        for file in self.files {
            let _ = writeln!(self.out, "| [{}]({}) | `{}` |", file.name, file.link, file.hash);
        }
        self.out.push('\n');
        for (name, number) in self.register.all() {
            let _ = writeln!(self.out, "[{name}]: {} \"{}\"", target(number, self.files), describe(number));
        }
    }
}

fn target(number: &Number, files: &[Evidence]) -> String {
    match number.origin() {
        Origin::Field { file, pointer } => format!("{}#{pointer}", files[*file].link),
        Origin::Quotient(dividend, _) => target(dividend, files),
    }
}

fn describe(number: &Number) -> String {
    match number.origin() {
        Origin::Field { .. } => format!("{}", number.value()),
        Origin::Quotient(..) => format!("{} = {}", number.value(), number.path()),
    }
}

fn escape(words: &str) -> String {
    words.replace('|', "\\|").replace('[', "\\[").replace(']', "\\]").replace('*', "\\*")
}
