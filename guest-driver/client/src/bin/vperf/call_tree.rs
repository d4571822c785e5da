//! Call trees: callers and callees. Each function has two shares of the samples: its own, and one that includes its
//! callees. Functions are identified by name.

use std::collections::HashMap;

use clap::ValueEnum;

/// The direction in which a tree grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Direction {
    /// From the outermost callers to the functions that they call.
    Down,
    /// From the sampled functions to their callers.
    Up,
}

/// A line of the tree. Its function is called by the function of the parent line or, in an upward
/// tree, calls the function of the parent line.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub(crate) struct Call {
    /// 0 for a process; for a function, one more than the parent line's depth.
    pub(crate) depth: usize,
    pub(crate) name: String,
    /// Samples in the function and in its subtree.
    pub(crate) samples: u64,
    pub(crate) percent: f64,
    /// Samples in the function itself, without its subtree.
    pub(crate) self_samples: u64,
    pub(crate) self_percent: f64,
}

#[derive(Debug, Default)]
struct Node {
    name: String,
    children: Vec<usize>,
    samples: u64,
    weight: u64,
    self_samples: u64,
    self_weight: u64,
}

/// A tree under construction.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    nodes: Vec<Node>,
    roots: Vec<usize>,
    /// Node by parent and name.
    index: HashMap<(Option<usize>, String), usize>,
    weight: u64,
}

impl Tree {
    /// Adds a sample of `weight`. `path` is the process's name, followed by the functions: from the
    /// outermost caller to the sampled function or, in an upward tree, in the opposite order.
    /// `path[own]` is the sampled function.
    pub(crate) fn add(&mut self, path: Vec<String>, own: usize, weight: u64) {
        self.weight = self.weight.saturating_add(weight);
        let mut parent = None;
        for (index, name) in path.into_iter().enumerate() {
            let at = self.child(parent, name);
            let node = &mut self.nodes[at];
            node.samples += 1;
            node.weight = node.weight.saturating_add(weight);
            if index == own {
                node.self_samples += 1;
                node.self_weight = node.self_weight.saturating_add(weight);
            }
            parent = Some(at);
        }
    }

    fn child(&mut self, parent: Option<usize>, name: String) -> usize {
        let key = (parent, name);
        if let Some(&at) = self.index.get(&key) {
            return at;
        }
        let at = self.nodes.len();
        self.nodes.push(Node { name: key.1.clone(), ..Node::default() });
        match parent {
            Some(parent) => self.nodes[parent].children.push(at),
            None => self.roots.push(at),
        }
        self.index.insert(key, at);
        at
    }

    /// Returns the tree's lines, each followed by its subtree, heavier siblings first.
    pub(crate) fn calls(&self) -> Vec<Call> {
        let mut calls = Vec::new();
        let mut left = Vec::new();
        self.push_sorted(&mut left, &self.roots, 0);
        while let Some((at, depth)) = left.pop() {
            let node = &self.nodes[at];
            calls.push(Call {
                depth,
                name: node.name.clone(),
                samples: node.samples,
                percent: share(node.weight, self.weight),
                self_samples: node.self_samples,
                self_percent: share(node.self_weight, self.weight),
            });
            self.push_sorted(&mut left, &node.children, depth + 1);
        }
        calls
    }

    /// Pushes nodes so that the heaviest is popped first.
    fn push_sorted(&self, stack: &mut Vec<(usize, usize)>, nodes: &[usize], depth: usize) {
        let mut nodes = nodes.to_vec();
        nodes.sort_by(|&a, &b| {
            let (a, b) = (&self.nodes[a], &self.nodes[b]);
            (a.weight, &b.name).cmp(&(b.weight, &a.name))
        });
        stack.extend(nodes.into_iter().map(|node| (node, depth)));
    }
}

/// A share in percent.
#[expect(clippy::cast_precision_loss, reason = "a displayed percentage")]
pub(crate) fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn callers_hold_what_they_call() {
        let mut tree = Tree::default();
        for _ in 0..3 {
            tree.add(path("p main often leaf"), 3, 10);
        }
        tree.add(path("p main seldom leaf"), 3, 9);
        tree.add(path("p main"), 1, 1);
        let lines: Vec<String> = tree
            .calls()
            .iter()
            .map(|call| {
                format!(
                    "{} {} {}/{} {}% {}%",
                    call.depth, call.name, call.samples, call.self_samples, call.percent, call.self_percent
                )
            })
            .collect();
        assert_eq!(
            lines,
            [
                "0 p 5/0 100% 0%",
                "1 main 5/1 100% 2.5%",
                "2 often 3/0 75% 0%",
                "3 leaf 3/3 75% 75%",
                "2 seldom 1/0 22.5% 0%",
                "3 leaf 1/1 22.5% 22.5%",
            ]
        );
    }

    #[test]
    fn recursion_is_a_line_for_each_call() {
        let mut tree = Tree::default();
        tree.add(vec!["f".to_owned(); 200], 0, 1);
        let calls = tree.calls();
        assert_eq!(calls.len(), 200);
        assert!(calls.iter().all(|call| call.samples == 1));
        assert_eq!(calls.last().map(|call| call.depth), Some(199));
        assert!(Tree::default().calls().is_empty());
    }
}
