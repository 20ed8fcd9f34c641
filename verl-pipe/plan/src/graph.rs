//! A directed graph over `0..n`: topological order, cycles, ancestors. Knows nothing of stages or tensors.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

use petgraph::algo::kosaraju_scc;
use petgraph::graph::{DiGraph, NodeIndex};

/// A directed graph whose nodes are numbered in the order of declaration.
#[derive(Debug, Clone, Default)]
pub struct Digraph {
    successors: Vec<Vec<usize>>,
    predecessors: Vec<Vec<usize>>,
}

impl Digraph {
    /// A graph of `n` nodes without edges.
    pub fn new(n: usize) -> Self {
        Digraph {
            successors: vec![Vec::new(); n],
            predecessors: vec![Vec::new(); n],
        }
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.successors.len()
    }

    /// Whether there is no node.
    pub fn is_empty(&self) -> bool {
        self.successors.is_empty()
    }

    /// Adds the edge `from → to`; nodes outside the graph are ignored.
    pub fn add_edge(&mut self, from: usize, to: usize) {
        if from < self.len() && to < self.len() {
            self.successors[from].push(to);
            self.predecessors[to].push(from);
        }
    }

    /// Nodes that `node` has an edge to.
    pub fn successors(&self, node: usize) -> &[usize] {
        &self.successors[node]
    }

    /// Nodes that have an edge to `node`.
    pub fn predecessors(&self, node: usize) -> &[usize] {
        &self.predecessors[node]
    }

    /// All nodes, each after its predecessors; ties are resolved by the lowest number.
    ///
    /// # Errors
    /// The cycles, one for each strongly connected component: each a shortest walk from its lowest node back to it,
    /// starting with that node and not repeating it at the end.
    pub fn topological_order(&self) -> Result<Vec<usize>, Vec<Vec<usize>>> {
        let mut waiting: Vec<usize> = self.predecessors.iter().map(Vec::len).collect();
        let mut ready: BinaryHeap<Reverse<usize>> = (0..self.len())
            .filter(|&node| waiting[node] == 0)
            .map(Reverse)
            .collect();
        let mut order = Vec::with_capacity(self.len());
        while let Some(Reverse(node)) = ready.pop() {
            order.push(node);
            for &next in &self.successors[node] {
                waiting[next] -= 1;
                if waiting[next] == 0 {
                    ready.push(Reverse(next));
                }
            }
        }
        if order.len() == self.len() {
            Ok(order)
        } else {
            Err(self.cycles())
        }
    }

    /// For each node whether `node` can be reached from it by one edge or more.
    pub fn ancestors(&self, node: usize) -> Vec<bool> {
        reach(&self.predecessors, node)
    }

    /// For each node whether it can be reached from `node` by one edge or more.
    pub fn descendants(&self, node: usize) -> Vec<bool> {
        reach(&self.successors, node)
    }

    fn cycles(&self) -> Vec<Vec<usize>> {
        let mut graph = DiGraph::<(), ()>::with_capacity(self.len(), self.len());
        for _ in 0..self.len() {
            graph.add_node(());
        }
        for (from, successors) in self.successors.iter().enumerate() {
            for &to in successors {
                graph.add_edge(NodeIndex::new(from), NodeIndex::new(to), ());
            }
        }
        let mut cycles: Vec<Vec<usize>> = kosaraju_scc(&graph)
            .into_iter()
            .map(|part| {
                part.into_iter()
                    .map(NodeIndex::index)
                    .collect::<BTreeSet<_>>()
            })
            .filter_map(|part| self.shortest_cycle(&part))
            .collect();
        cycles.sort();
        cycles
    }

    /// A shortest walk inside `part` from its lowest node back to it.
    fn shortest_cycle(&self, part: &BTreeSet<usize>) -> Option<Vec<usize>> {
        let &start = part.first()?;
        let mut came_from = vec![None; self.len()];
        let mut queue = VecDeque::from([start]);
        while let Some(node) = queue.pop_front() {
            for &next in &self.successors[node] {
                if next == start {
                    let mut walk = vec![node];
                    let mut at = node;
                    while let Some(previous) = came_from[at] {
                        walk.push(previous);
                        at = previous;
                    }
                    walk.reverse();
                    return Some(walk);
                }
                if part.contains(&next) && came_from[next].is_none() {
                    came_from[next] = Some(node);
                    queue.push_back(next);
                }
            }
        }
        None
    }
}

fn reach(edges: &[Vec<usize>], start: usize) -> Vec<bool> {
    let mut seen = vec![false; edges.len()];
    let mut stack = vec![start];
    while let Some(node) = stack.pop() {
        for &next in &edges[node] {
            if !seen[next] {
                seen[next] = true;
                stack.push(next);
            }
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(n: usize, edges: &[(usize, usize)], expected: Result<&[usize], &[&[usize]]>) {
        let mut graph = Digraph::new(n);
        for &(from, to) in edges {
            graph.add_edge(from, to);
        }
        let expected = expected
            .map(<[usize]>::to_vec)
            .map_err(|cycles| cycles.iter().map(|walk| walk.to_vec()).collect::<Vec<_>>());
        assert_eq!(graph.topological_order(), expected);
    }

    #[test]
    fn orders_with_ties_by_number() {
        check(0, &[], Ok(&[]));
        check(3, &[], Ok(&[0, 1, 2]));
        check(4, &[(3, 0), (0, 1), (3, 1)], Ok(&[2, 3, 0, 1]));
        check(3, &[(2, 1), (2, 1), (1, 0)], Ok(&[2, 1, 0]));
    }

    #[test]
    fn reports_each_cycle_as_a_shortest_walk() {
        check(1, &[(0, 0)], Err(&[&[0]]));
        check(3, &[(0, 1), (1, 2), (2, 0)], Err(&[&[0, 1, 2]]));
        check(
            6,
            &[(0, 1), (1, 2), (2, 1), (2, 3), (4, 5), (5, 4)],
            Err(&[&[1, 2], &[4, 5]]),
        );
        check(
            4,
            &[(0, 1), (1, 2), (2, 3), (3, 0), (1, 0)],
            Err(&[&[0, 1]]),
        );
    }

    #[test]
    fn finds_ancestors() {
        let mut graph = Digraph::new(4);
        graph.add_edge(0, 1);
        graph.add_edge(1, 2);
        assert_eq!(graph.ancestors(2), [true, true, false, false]);
        assert_eq!(graph.descendants(0), [false, true, true, false]);
    }

    #[test]
    fn a_deep_chain_does_not_exhaust_the_stack() {
        let n = 200_000;
        let mut graph = Digraph::new(n);
        for node in 1..n {
            graph.add_edge(node - 1, node);
        }
        graph.add_edge(n - 1, 0);
        assert_eq!(
            graph.topological_order().map_err(|cycles| cycles[0].len()),
            Err(n)
        );
    }
}
