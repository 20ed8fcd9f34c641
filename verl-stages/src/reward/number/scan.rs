//! The parts of a number, from left to right.

use super::{Number, Scaled};

/// Words that may precede a number without changing it.
const LEADS: &str =
    "the final answer is about approximately approx. approx around roughly exactly only total ≈ ~";
/// Currencies, as signs and letters; longer ones first.
const CURRENCIES: &str = "US$ CA$ AU$ NZ$ HK$ $ £ € ¥ ₹ ₽ ₩ ₪ ₫ ฿ ₱ ₦ ₴ ₺ ₿ USD EUR GBP JPY CNY RMB INR CAD AUD CHF \
    Rs. Rs";
/// Marks between groups of digits.
const SEPARATORS: &[char] = &[
    ',', '\'', '’', '_', ' ', '\u{a0}', '\u{2007}', '\u{2009}', '\u{200a}', '\u{202f}',
];
/// Fractions that are one character, and what they are.
const VULGAR: &str = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒";
#[rustfmt::skip]
const VULGAR_VALUES: [(i32, i32); 18] = [
    (1, 2), (1, 3), (2, 3), (1, 4), (3, 4), (1, 5), (2, 5), (3, 5), (4, 5), (1, 6), (5, 6), (1, 7), (1, 8), (3, 8),
    (5, 8), (7, 8), (1, 9), (1, 10),
];
/// Most words of a label before `=` or `:`.
const LONGEST_LABEL: usize = 5;

/// Whether the number is negative, and the text from its first digit on.
pub(super) fn before_number(text: &str) -> Option<(bool, &str)> {
    let mut rest = text;
    while let Some(after) = label(rest)? {
        rest = super::plain::unwrapped(after);
    }
    let mut negative = None;
    loop {
        rest = rest.trim_start_matches(|c: char| c.is_whitespace() || matches!(c, '*' | '_' | '`'));
        let signs = [
            ("-", true),
            ("−", true),
            ("–", true),
            ("+", false),
            ("minus ", true),
            ("negative ", true),
        ];
        if let Some((sign, below)) = signs.iter().find(|(sign, _)| starts(rest, sign)) {
            if negative.replace(*below).is_some() {
                return None;
            }
            rest = &rest[sign.len()..];
        } else if let Some(lead) = CURRENCIES
            .split_whitespace()
            .find(|lead| starts(rest, lead))
        {
            rest = &rest[lead.len()..];
        } else if let Some(lead) = LEADS.split_whitespace().find(|lead| is_word(rest, lead)) {
            rest = rest[lead.len()..].trim_start_matches(':');
        } else {
            return Some((negative == Some(true), rest));
        }
    }
}

fn starts(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

fn is_word(text: &str, word: &str) -> bool {
    let whole = !text
        .get(word.len()..)
        .is_some_and(|after| after.starts_with(char::is_alphanumeric));
    starts(text, word) && (whole || !word.ends_with(char::is_alphabetic))
}

/// The text after a label such as `x =` or `Total cost:`; `Some(None)` without a label, `None` if another sign precedes the
/// number.
fn label(text: &str) -> Option<Option<&str>> {
    let Some(at) = text.find(['=', ':', '≠', '<', '>', '≤', '≥']) else {
        return Some(None);
    };
    let (before, after) = text.split_at(at);
    if before.contains(|c: char| c.is_numeric()) {
        // The sign comes after the number; `tail` decides what may follow a number.
        return Some(None);
    }
    let mark = after.chars().next()?;
    let simple = |c: char| {
        c.is_alphabetic()
            || c.is_whitespace()
            || matches!(c, '*' | '_' | '(' | ')' | '\'' | '-' | '$')
    };
    let words = before.split_whitespace().count();
    let negates = before
        .split(|c: char| !c.is_alphabetic())
        .any(super::tail::negates);
    let sound = matches!(mark, '=' | ':')
        && before.chars().all(simple)
        && words <= LONGEST_LABEL
        && !negates;
    sound.then(|| Some(&after[mark.len_utf8()..]))
}

/// A number without a sign at the start of `text`, and what follows it.
pub(super) fn unsigned(text: &str) -> Option<(Number, &str)> {
    if let Some((number, rest)) = vulgar(text) {
        return Some((number, rest));
    }
    let (first, rest) = decimal(text)?;
    let whole = first.exponent >= 0;
    if let Some((top, bottom, rest)) = whole.then(|| part_after(rest)).flatten() {
        // A mixed number: 1 3/4 or 1¾.
        let sum = to_integer(&first)? * to_integer(&bottom)? + to_integer(&top)?;
        let top = Scaled::new(&sum.to_string(), 0)?;
        return Some((Number { top, bottom }, rest));
    }
    if let Some(below) = rest.trim_start().strip_prefix(['/', '⁄']) {
        let below = below.trim_start();
        if below.starts_with(|c: char| c.is_ascii_digit()) {
            let (bottom, rest) = decimal(below)?;
            return fraction(first, bottom).map(|number| (number, rest));
        }
    }
    Some((whole_number(first), rest))
}

fn whole_number(top: Scaled) -> Number {
    let bottom = Scaled {
        integer: 1.into(),
        exponent: 0,
    };
    Number { top, bottom }
}

fn fraction(top: Scaled, bottom: Scaled) -> Option<Number> {
    (!bottom.is_zero()).then_some(Number { top, bottom })
}

/// The integer itself; `None` if it ends in too many zeros.
fn to_integer(scaled: &Scaled) -> Option<num_bigint::BigInt> {
    let zeros = u32::try_from(scaled.exponent)
        .ok()
        .filter(|zeros| *zeros <= 64)?;
    Some(&scaled.integer * num_bigint::BigInt::from(10).pow(zeros))
}

/// A fraction after an integer: ` 3/4` or `¾`.
fn part_after(text: &str) -> Option<(Scaled, Scaled, &str)> {
    if let Some((number, rest)) = vulgar(text.trim_start()) {
        return Some((number.top, number.bottom, rest));
    }
    let text = text.strip_prefix(char::is_whitespace)?.trim_start();
    let end = |text: &str| {
        text.find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len())
    };
    let (top, rest) = text.split_at(end(text));
    let rest = rest.strip_prefix(['/', '⁄'])?;
    let (bottom, rest) = rest.split_at(end(rest));
    let (top, bottom) = (Scaled::new(top, 0)?, Scaled::new(bottom, 0)?);
    (to_integer(&top)? < to_integer(&bottom)?).then_some((top, bottom, rest))
}

fn vulgar(text: &str) -> Option<(Number, &str)> {
    let c = text.chars().next()?;
    let at = VULGAR.chars().position(|known| known == c)?;
    let (top, bottom) = *VULGAR_VALUES.get(at)?;
    let scaled = |n: i32| Scaled::new(&n.to_string(), 0);
    let number = fraction(scaled(top)?, scaled(bottom)?)?;
    Some((number, &text[c.len_utf8()..]))
}

/// Digits with groups of thousands, a fraction and an exponent: `1,234.5e-3`, `1.2 × 10^5`.
fn decimal(text: &str) -> Option<(Scaled, &str)> {
    let (mut digits, mut rest) = integer(text)?;
    let mut exponent = 0i64;
    if let Some(after) = rest.strip_prefix('.') {
        let end = after
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(after.len());
        if end > 0 {
            digits.push_str(&after[..end]);
            exponent = -i64::try_from(end).ok()?;
            rest = &after[end..];
        }
    }
    if digits.is_empty() {
        return None;
    }
    if digits == "10"
        && exponent == 0
        && let Some((power, rest)) = power(rest)
    {
        return Some((Scaled::new("1", power?)?, rest));
    }
    if let Some((power, after)) = power_of_ten(rest) {
        exponent = exponent.checked_add(power?)?;
        rest = after;
    }
    Some((Scaled::new(&digits, exponent)?, rest))
}

/// Digits before the point. Groups have three digits, or two with three in the last group as in India; other groups do
/// not form a number.
fn integer(text: &str) -> Option<(String, &str)> {
    let run = |text: &str| {
        text.find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len())
    };
    let (first, mut rest) = text.split_at(run(text));
    let mut digits = first.to_owned();
    let mut groups = vec![first.len()];
    let mark = rest
        .chars()
        .next()
        .filter(|c| SEPARATORS.contains(c) && !first.is_empty());
    while let Some(after) = mark.and_then(|mark| rest.strip_prefix(mark)) {
        let group = run(after);
        if group == 0 {
            break;
        }
        if mark.is_some_and(char::is_whitespace) && (group != 3 || after[group..].starts_with('/'))
        {
            // Not a group; callers decide what may follow the space.
            break;
        }
        groups.push(group);
        digits.push_str(&after[..group]);
        rest = &after[group..];
    }
    let thousands = groups[0] <= 3 && groups[1..].iter().all(|group| *group == 3);
    let indian = groups.len() > 2
        && groups[0] <= 2
        && groups.last() == Some(&3)
        && groups[1..groups.len() - 1].iter().all(|group| *group == 2);
    let grouped = (thousands || indian) && !digits.starts_with('0');
    (groups.len() == 1 || grouped).then_some((digits, rest))
}

/// `e5`, `× 10^5`, `x 10⁵`. The exponent is `None` if it overflows.
fn power_of_ten(text: &str) -> Option<(Option<i64>, &str)> {
    if let Some(after) = text.strip_prefix(['e', 'E']) {
        let (power, rest) = signed(after)?;
        return (!rest.starts_with(char::is_alphabetic)).then_some((power, rest));
    }
    let after = text.trim_start().strip_prefix(['×', '*', '·', '⋅', 'x'])?;
    let after = after.trim_start().strip_prefix("10")?;
    power(after)
}

/// `^5`, `^-5`, `**5`, `⁻⁵`.
fn power(text: &str) -> Option<(Option<i64>, &str)> {
    if let Some(after) = text.strip_prefix('^').or_else(|| text.strip_prefix("**")) {
        return signed(after.trim_start_matches('('));
    }
    let raised = "⁰¹²³⁴⁵⁶⁷⁸⁹";
    let end = text
        .find(|c: char| c != '⁻' && !raised.contains(c))
        .unwrap_or(text.len());
    let (raised_digits, rest) = text.split_at(end);
    let lowered: String = raised_digits
        .chars()
        .filter_map(|c| match raised.chars().position(|r| r == c) {
            Some(digit) => char::from_digit(u32::try_from(digit).ok()?, 10),
            None => Some('-'),
        })
        .collect();
    match signed(&lowered) {
        Some((power, "")) => Some((power, rest)),
        _ => None,
    }
}

fn signed(text: &str) -> Option<(Option<i64>, &str)> {
    let (negative, digits) = match text.strip_prefix(['-', '−']) {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = digits
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(digits.len());
    if end == 0 {
        return None;
    }
    let power = digits[..end]
        .parse()
        .ok()
        .map(|power: i64| if negative { -power } else { power });
    Some((power, &digits[end..]))
}
