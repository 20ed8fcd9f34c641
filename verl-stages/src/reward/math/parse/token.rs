//! Splits LaTeX and plain text into tokens.

/// Most tokens of an answer.
const MOST_TOKENS: usize = 2000;

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// Digits with at most one point.
    Number(String),
    Letter(char),
    /// A command of LaTeX or a function's name, without the backslash.
    Command(String),
    /// Words: `\text{…}`.
    Text(String),
    /// A bracket, an operator, a relation, `,` between items.
    Sign(char),
    /// `\begin{…}` and `\end{…}` of a matrix.
    Begin,
    End,
    /// The next row of a matrix.
    Row,
}

/// Commands that show their argument as words.
const WORDS: &str = "text textbf textit textrm textsf texttt textnormal emph mbox hbox mathrm mathsf mathtt \
    operatorname";
/// Commands that change only how their argument looks.
const LOOKS: &str = "mathbf mathit mathcal boldsymbol bm boxed fbox underline displaystyle textstyle scriptstyle \
    limits nolimits left right big Big bigg Bigg bigl bigr Bigl Bigr mleft mright rm bf it quad \
    qquad thinspace hfill";
/// Commands that are one sign, each with its sign.
const SIGNS: &str = "times * cdot * ast * div / pm ± mp ∓ le ≤ leq ≤ leqslant ≤ ge ≥ geq ≥ geqslant ≥ lt < gt > \
    ne ≠ neq ≠ in ∈ cup ∪ cap ∩ setminus ∖ backslash ∖ infty ∞ pi π circ ° degree ° approx ≈ \
    simeq ≈ emptyset ∅ varnothing ∅ lbrace ⦃ rbrace ⦄ lvert | rvert | vert | mid | lfloor ⌊ \
    rfloor ⌋ lceil ⌈ rceil ⌉ langle ( rangle ) lbrack [ rbrack ] imath i colon :";
/// Words of plain text that are signs or functions, each with its sign or command.
const PLAIN: &str = "infinity infty inf infty pi pi percent % percentage % pct % and , or , sqrt sqrt log log \
    degrees circ degree circ";

/// Whether a word is in a list of words.
pub(super) fn is_in(list: &str, word: &str) -> bool {
    list.split_whitespace().any(|known| known == word)
}

/// The meaning of `word` in a list of words, each followed by its meaning.
fn meaning(list: &'static str, word: &str) -> Option<&'static str> {
    let mut words = list.split_whitespace();
    while let (Some(known), Some(meaning)) = (words.next(), words.next()) {
        if known == word {
            return Some(meaning);
        }
    }
    None
}

/// The tokens of an answer; `None` if there are too many, or a bracket of a command is not closed.
pub(super) fn tokens(text: &str) -> Option<Vec<Token>> {
    let mut lexer = Lexer {
        chars: text.chars().collect(),
        at: 0,
        out: Vec::new(),
    };
    while lexer.at < lexer.chars.len() {
        lexer.next()?;
        if lexer.out.len() > MOST_TOKENS {
            return None;
        }
    }
    Some(lexer.out)
}

struct Lexer {
    chars: Vec<char>,
    at: usize,
    out: Vec<Token>,
}

impl Lexer {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    fn run(&self, from: usize, is: impl Fn(char) -> bool) -> usize {
        let end = self.chars[from..].iter().position(|c| !is(*c));
        end.map_or(self.chars.len(), |length| from + length)
    }

    fn sign(&mut self, sign: char) {
        // `, and` is one comma.
        if sign != ',' || self.out.last() != Some(&Token::Sign(',')) {
            self.out.push(Token::Sign(sign));
        }
    }

    fn next(&mut self) -> Option<()> {
        let c = self.peek(0)?;
        self.at += 1;
        match c {
            '\\' => return self.command(),
            '0'..='9' => self.number(self.at - 1),
            '.' if self.peek(0).is_some_and(|c| c.is_ascii_digit()) => self.number(self.at - 1),
            'a'..='z' | 'A'..='Z' => self.word(),
            c if c.is_whitespace() || matches!(c, '$' | '~' | '"' | '&' | '\u{200b}') => {
                if c == '&' {
                    self.out.push(Token::Sign('&'));
                }
            }
            '−' | '–' | '‑' => self.sign('-'),
            '×' | '·' | '⋅' | '∙' => self.sign('*'),
            '*' if self.peek(0) == Some('*') => {
                self.at += 1;
                self.sign('^');
            }
            '÷' | '∕' | '⁄' => self.sign('/'),
            '<' | '>' | '!' | '=' if self.peek(0) == Some('=') => {
                self.at += 1;
                self.sign(match c {
                    '<' => '≤',
                    '>' => '≥',
                    '!' => '≠',
                    _ => '=',
                });
            }
            '⩽' | '≦' => self.sign('≤'),
            '⩾' | '≧' => self.sign('≥'),
            '√' => self.out.push(Token::Command("sqrt".into())),
            '²' | '³' => {
                self.sign('^');
                self.out
                    .push(Token::Number(if c == '²' { "2" } else { "3" }.into()));
            }
            'ℝ' | 'ℤ' | 'ℚ' | 'ℕ' | 'ℂ' => self.out.push(Token::Command(format!(
                "set{}",
                "RZQNC"
                    .chars()
                    .nth("ℝℤℚℕℂ".chars().position(|set| set == c)?)?
            ))),
            '{' if self.is_braced_comma() => {}
            _ if "+-*/^_=<>≤≥≠∈∪∩∖±∓(){}[]|,;:!%'π∞°≈∅⌊⌋⌈⌉".contains(c) => {
                self.sign(if c == ';' { ',' } else { c })
            }
            c if c.is_alphabetic() => self.out.push(Token::Letter(c.to_lowercase().next()?)),
            _ => return None,
        }
        Some(())
    }

    fn is_braced_comma(&mut self) -> bool {
        let braced = self.peek(0) == Some(',') && self.peek(1) == Some('}');
        if braced {
            self.at += 2;
            self.sign(',');
        }
        braced
    }

    /// A number from `start` on, with thousands separators that cannot separate items of a list: `1{,}000`, `1\,000`.
    fn number(&mut self, start: usize) {
        let digit = |c: char| c.is_ascii_digit();
        let mut at = self.run(start, digit);
        let mut number: String = self.chars[start..at].iter().collect();
        if (1..=3).contains(&number.len()) && !number.starts_with('0') {
            while let Some(length) = self.separator(at) {
                let end = self.run(at + length, digit);
                if end - at - length != 3 {
                    break;
                }
                number.extend(&self.chars[at + length..end]);
                at = end;
            }
        }
        if self.chars.get(at) == Some(&'.') && self.chars.get(at + 1).copied().is_some_and(digit) {
            let end = self.run(at + 1, digit);
            number.extend(&self.chars[at..end]);
            at = end;
        } else if self.chars.get(at) == Some(&'.') && self.chars.get(at + 1) == Some(&'\\') {
            // `0.\overline{3}`.
            number.push('.');
            at += 1;
        }
        self.at = at;
        self.out.push(Token::Number(number));
    }

    /// Length of a thousands separator.
    fn separator(&self, at: usize) -> Option<usize> {
        let rest: String = self.chars[at..].iter().take(5).collect();
        [
            "{,}", "\\,", ",\\!", "\\!", "\\ ", "\u{2009}", "\u{202f}", "\u{a0}",
        ]
        .iter()
        .find(|mark| rest.starts_with(**mark))
        .map(|mark| mark.chars().count())
    }

    /// A word of plain text: a known name, otherwise its letters.
    fn word(&mut self) {
        let start = self.at - 1;
        let end = self.run(start, |c| c.is_ascii_alphabetic());
        let word: String = self.chars[start..end].iter().collect();
        let lower = word.to_lowercase();
        self.at = end;
        if let Some(name) = meaning(PLAIN, &lower) {
            match name {
                "," | "%" => self.sign(name.chars().next().unwrap_or(',')),
                name => self.named(name),
            }
        } else if super::super::expr::Function::named(&word).is_some() {
            self.out.push(Token::Command(word));
        } else {
            self.out.extend(lower.chars().map(Token::Letter));
        }
    }

    fn named(&mut self, name: &str) {
        match meaning(SIGNS, name).and_then(|sign| sign.chars().next()) {
            Some('i') => self.out.push(Token::Letter('i')),
            Some(sign) => self.sign(sign),
            None => self.out.push(Token::Command(name.to_owned())),
        }
    }

    fn command(&mut self) -> Option<()> {
        let start = self.at;
        self.at = self.run(start, |c| c.is_ascii_alphabetic());
        let name: String = self.chars[start..self.at].iter().collect();
        match name.as_str() {
            "" => {
                let c = self.peek(0)?;
                self.at += 1;
                match c {
                    '{' => self.sign('⦃'),
                    '}' => self.sign('⦄'),
                    '%' => self.sign('%'),
                    '|' => self.sign('|'),
                    '\\' => {
                        // `\\frac` with a backslash too many is a command; within a matrix it is a new row.
                        if !self.out.contains(&Token::Begin)
                            && self.peek(0).is_some_and(|c| c.is_ascii_alphabetic())
                        {
                            return self.command();
                        }
                        self.out.push(Token::Row);
                    }
                    '$' | ',' | ';' | ':' | '!' | '>' | ' ' | '\n' | '(' | ')' | '[' | ']'
                    | '"' | '\'' | '/' => {}
                    _ => return None,
                }
            }
            "frac" | "dfrac" | "cfrac" | "tfrac" => self.out.push(Token::Command("frac".into())),
            "binom" | "dbinom" | "tbinom" => self.out.push(Token::Command("binom".into())),
            "begin" | "end" => {
                let kind = self.braced()?;
                if !kind.contains("matrix") && kind != "array" {
                    return None;
                }
                if kind == "array" && name == "begin" {
                    self.braced()?;
                }
                self.out.push(if name == "begin" {
                    Token::Begin
                } else {
                    Token::End
                });
            }
            "color" | "textcolor" => drop(self.braced()?),
            "mathbb" => {
                let set = self.braced()?;
                self.out.push(Token::Command(format!("set{set}")));
            }
            words if is_in(WORDS, words) => {
                let words = self.braced()?;
                self.text(words.trim());
            }
            "left" | "right" if self.peek(0) == Some('.') => self.at += 1,
            looks if is_in(LOOKS, looks) => {}
            name => self.named(name),
        }
        Some(())
    }

    /// Words: a separator, a sign, mathematics written as words, or a text.
    fn text(&mut self, words: &str) {
        match words.to_lowercase().as_str() {
            "" => {}
            "and" | "or" | ", and" | ", or" | "," => self.sign(','),
            "percent" | "percentage" | "pct" | "%" | "\\%" => self.sign('%'),
            "infinity" => self.sign('∞'),
            lower => {
                let mathematics = !lower.contains(|c: char| c.is_alphabetic());
                match mathematics.then(|| tokens(lower)).flatten() {
                    Some(inner) => self.out.extend(inner),
                    None => match super::super::expr::Function::named(lower) {
                        Some(_) => self.out.push(Token::Command(lower.to_owned())),
                        None => self.out.push(Token::Text(lower.to_owned())),
                    },
                }
            }
        }
    }

    /// The contents of braces after a command, without inner braces.
    fn braced(&mut self) -> Option<String> {
        self.at = self.run(self.at, char::is_whitespace);
        if self.peek(0)? != '{' {
            return None;
        }
        let mut depth = 0usize;
        let start = self.at + 1;
        loop {
            match self.peek(0)? {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            self.at += 1;
            if depth == 0 {
                let inner = self.chars[start..self.at - 1].iter();
                return Some(inner.filter(|c| !matches!(c, '{' | '}')).collect());
            }
        }
    }
}
