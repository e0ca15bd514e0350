package manifests

import (
	"fmt"
	"sort"
	"strconv"
	"strings"
)

// Indexes is a set of a Job's indexes, as ordered intervals: what a status
// shows as "1,3-5,7".
type Indexes []IndexRange

// IndexRange is First to Last, both included.
type IndexRange struct{ First, Last int32 }

// ParseIndexes reads the text form; every index must be less than n.
func ParseIndexes(text string, n int32) (Indexes, error) {
	if text == "" {
		return nil, nil
	}
	var out Indexes
	for _, part := range strings.Split(text, ",") {
		limits := strings.Split(part, "-")
		if len(limits) > 2 {
			return nil, fmt.Errorf("the fragment %q violates the requirement that an index interval can have at most two parts separated by '-'", part)
		}
		var r IndexRange
		for i, l := range limits {
			v, err := strconv.Atoi(l)
			if err != nil {
				return nil, fmt.Errorf("cannot convert string to integer for index: %q", l)
			}
			if v >= int(n) {
				return nil, fmt.Errorf("too large index: %q", l)
			}
			if r.Last = int32(v); i == 0 { //nolint:gosec // below n, which is an int32
				r.First = r.Last
			}
		}
		if len(limits) == 2 && r.First >= r.Last {
			return nil, fmt.Errorf("non-increasing order, previous: %d, current: %d", r.First, r.Last)
		}
		if k := len(out); k > 0 && out[k-1].Last >= r.First {
			return nil, fmt.Errorf("non-increasing order, previous: %d, current: %d", out[k-1].Last, r.First)
		}
		out = append(out, r)
	}
	return out, nil
}

// Below drops what is not less than n.
func (x Indexes) Below(n int32) Indexes {
	var out Indexes
	for _, r := range x {
		if r.First < n {
			out = append(out, IndexRange{r.First, min(r.Last, n-1)})
		}
	}
	return out
}

// Len counts the indexes.
func (x Indexes) Len() int {
	n := 0
	for _, r := range x {
		n += int(r.Last-r.First) + 1
	}
	return n
}

// Has says whether i is in the set.
func (x Indexes) Has(i int32) bool {
	k := sort.Search(len(x), func(k int) bool { return x[k].Last >= i })
	return k < len(x) && x[k].First <= i
}

// With returns the set with more indexes, which may come in any order and
// more than once.
func (x Indexes) With(more ...int32) Indexes {
	if len(more) == 0 {
		return x
	}
	all := append(Indexes(nil), x...)
	for _, i := range more {
		all = append(all, IndexRange{i, i})
	}
	sort.Slice(all, func(a, b int) bool { return all[a].First < all[b].First })
	out := all[:1]
	for _, r := range all[1:] {
		if last := &out[len(out)-1]; r.First <= last.Last+1 {
			last.Last = max(last.Last, r.Last)
		} else {
			out = append(out, r)
		}
	}
	return out
}

// String is the text form: two adjacent indexes are written apart, as
// upstream does.
func (x Indexes) String() string {
	var b strings.Builder
	put := func(s string, v int32) {
		if b.Len() > 0 {
			b.WriteString(s)
		}
		b.WriteString(strconv.Itoa(int(v)))
	}
	for _, r := range x {
		put(",", r.First)
		switch {
		case r.Last == r.First+1:
			put(",", r.Last)
		case r.Last > r.First:
			put("-", r.Last)
		}
	}
	return b.String()
}
