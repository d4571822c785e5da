//! A flame graph as an SVG that needs nothing else. A click on a frame zooms to it, a click on the lowest frame returns;
//! Ctrl-F or the button searches.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};

use crate::selection::Selection;
use crate::stacks::Mode;

/// Sizes in pixels. The script has the same numbers.
const WIDTH: f64 = 1200.0;
const PAD: f64 = 10.0;
const ROW: usize = 17;
const TOP: usize = 60;
const BOTTOM: usize = 40;
/// Frames narrower than this are left out.
const NARROWEST: f64 = 0.1;
/// Width of a letter.
const LETTER: f64 = 7.0;

/// Zooms and searches.
const SCRIPT: &str = include_str!("svg.js");

/// A frame, with all stacks that have the same callers.
#[derive(Debug, Default)]
struct Node<'a> {
    weight: u64,
    callees: BTreeMap<(&'a str, Option<Mode>), usize>,
}

/// Text with XML's characters escaped. The names have no control characters.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                // XML excludes these two.
                '\u{fffe}' | '\u{ffff}' => f.write_str("?")?,
                character => write!(f, "{character}")?,
            }
        }
        Ok(())
    }
}

/// Writes a selection.
///
/// # Errors
/// Errors of `out`.
pub(crate) fn write(selection: &Selection<'_>, out: &mut impl Write) -> io::Result<()> {
    let nodes = nodes(selection);
    let frames = layout(&nodes);
    let rows = frames.iter().map(|frame| frame.row + 1).max().unwrap_or(1);
    let height = TOP + rows * ROW + BOTTOM;
    let unit = selection.unit();
    let (event, total) = (Escaped(selection.event()), nodes.first().map_or(0, |node| node.weight));
    write!(
        out,
        r##"<?xml version="1.0" encoding="UTF-8"?>
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" font-family="monospace" font-size="12">
<style>.f:hover rect {{ stroke: #000; }} .f {{ cursor: pointer; }} .hide {{ display: none; }} .dim {{ opacity: 0.5; }} .found rect {{ fill: #c3f; }} .b {{ cursor: pointer; fill: #555; }}</style>
<rect width="100%" height="100%" fill="#fdfdf5"/>
<text x="{middle}" y="24" font-size="17" text-anchor="middle">{event}: {total} {unit}</text>
<text id="reset" class="b hide" x="{PAD}" y="24">Reset zoom</text>
<text id="search" class="b" x="{right}" y="24" text-anchor="end">Search</text>
<text id="matched" x="{right}" y="{details}" text-anchor="end"> </text>
<text id="details" x="{PAD}" y="{details}"> </text>
<g id="frames">
"##,
        middle = WIDTH / 2.0,
        right = WIDTH - PAD,
        details = height - 12,
    )?;
    for frame in &frames {
        frame.write(out, rows, total, unit)?;
    }
    // The script has neither `]]>` nor the text of the recording.
    write!(out, "</g>\n<script><![CDATA[\n{SCRIPT}]]></script>\n</svg>\n")
}

/// Merges the selection's stacks by their frames' names. The first node is the root.
fn nodes<'a>(selection: &Selection<'a>) -> Vec<Node<'a>> {
    let mut nodes = vec![Node::default()];
    for ((task, stack), weight) in selection.totals() {
        let frames = selection.profile.stacks.frames(stack);
        let frames: Vec<_> = frames.map(|frame| (frame.name.as_str(), Some(frame.mode))).collect();
        let mut at = 0;
        for key in std::iter::once((task, None)).chain(frames.into_iter().rev()) {
            let next = nodes.len();
            let Some(node) = nodes.get_mut(at) else {
                break;
            };
            node.weight = node.weight.saturating_add(weight);
            at = *node.callees.entry(key).or_insert(next);
            if at == next {
                nodes.push(Node::default());
            }
        }
        if let Some(node) = nodes.get_mut(at) {
            node.weight = node.weight.saturating_add(weight);
        }
    }
    nodes
}

/// A frame of the picture.
struct Placed<'a> {
    name: &'a str,
    mode: Option<Mode>,
    weight: u64,
    row: usize,
    /// Position and width, as shares of the whole.
    x: f64,
    width: f64,
}

/// Places the frames: callees above their caller, in alphabetical order.
fn layout<'a>(nodes: &[Node<'a>]) -> Vec<Placed<'a>> {
    #[expect(clippy::cast_precision_loss, reason = "a share of a picture")]
    let share = |weight: u64| weight as f64 / nodes.first().map_or(1, |node| node.weight.max(1)) as f64;
    let mut placed = Vec::new();
    let mut waiting = vec![(0, "all", None, 0, 0.0)];
    while let Some((index, name, mode, row, x)) = waiting.pop() {
        let Some(node) = nodes.get(index) else {
            continue;
        };
        let width = share(node.weight);
        if width * (WIDTH - 2.0 * PAD) < NARROWEST {
            continue;
        }
        placed.push(Placed { name, mode, weight: node.weight, row, x, width });
        let mut x = x;
        for (&(name, mode), &callee) in &node.callees {
            waiting.push((callee, name, mode, row + 1, x));
            x += nodes.get(callee).map_or(0.0, |node| share(node.weight));
        }
    }
    placed
}

impl Placed<'_> {
    fn write(&self, out: &mut impl Write, rows: usize, total: u64, unit: &str) -> io::Result<()> {
        let y = TOP + (rows - 1 - self.row) * ROW;
        let scale = WIDTH - 2.0 * PAD;
        let (x, width) = (PAD + self.x * scale, self.width * scale);
        #[expect(clippy::cast_precision_loss, reason = "a percentage to print")]
        let percent = 100.0 * self.weight as f64 / total.max(1) as f64;
        let (name, weight) = (Escaped(self.name), self.weight);
        let label = shorten(self.name, width);
        writeln!(
            out,
            r#"<g class="f" data-x="{:.9}" data-w="{:.9}" data-d="{}" data-n="{name}"><title>{name} ({weight} {unit}, {percent:.2}%)</title><rect x="{x:.2}" y="{y}" width="{width:.2}" height="{height}" rx="1" fill="{colour}"/><text x="{text_x:.2}" y="{text_y}">{label}</text></g>"#,
            self.x,
            self.width,
            self.row,
            height = ROW - 1,
            colour = self.colour(),
            text_x = x + 3.0,
            text_y = y + 12,
            label = Escaped(&label),
        )
    }

    /// The colour: orange for the kernel, yellow for programs, grey for tasks. The name determines its shade.
    fn colour(&self) -> String {
        let hash = self.name.bytes().fold(5381_u32, |hash, byte| hash.wrapping_mul(33) ^ u32::from(byte));
        let shade = hash % 50;
        let (red, green, blue) = match self.mode {
            Some(Mode::Kernel) => (235, 110 + shade, 50),
            Some(Mode::User) => (235, 180 + shade, 60 + shade),
            Some(Mode::Other) => (150 + shade, 200, 150 + shade),
            None => (190 + shade / 2, 195 + shade / 2, 205 + shade / 2),
        };
        format!("rgb({red},{green},{blue})")
    }
}

/// Shortens a name to a width in pixels.
fn shorten(name: &str, width: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
    let room = ((width - 6.0) / LETTER) as usize;
    match name.chars().count() <= room {
        true => name.to_owned(),
        false if room < 3 => String::new(),
        false => name.chars().take(room - 2).chain("..".chars()).collect(),
    }
}
