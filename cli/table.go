package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// tableWriter prints server-made tables; columns keep their widths between
// calls, so that the rows of a watch line up.
type tableWriter struct {
	out      io.Writer
	wide     bool
	noHeader bool
	withNS   bool
	labels   bool   // as the last column
	prefix   string // "pod/": with several resource types
	columns  []metav1.TableColumnDefinition
	widths   []int
	started  bool
}

func (t *tableWriter) print(tab *metav1.Table) error {
	if len(tab.ColumnDefinitions) > 0 {
		t.columns = tab.ColumnDefinitions
	}
	var keep []int
	var header []string
	if t.withNS {
		header = append(header, "NAMESPACE")
	}
	for i, c := range t.columns {
		if c.Priority == 0 || t.wide {
			keep = append(keep, i)
			header = append(header, strings.ToUpper(c.Name))
		}
	}
	if t.labels {
		header = append(header, "LABELS")
	}
	rows := make([][]string, 0, len(tab.Rows)+1)
	if !t.started && !t.noHeader {
		rows = append(rows, header)
	}
	for _, r := range tab.Rows {
		var row []string
		if t.withNS {
			row = append(row, metaOf(r.Object.Raw).Namespace)
		}
		for n, i := range keep {
			s := "<none>"
			if i < len(r.Cells) && r.Cells[i] != nil {
				s = cell(r.Cells[i])
			}
			if n == 0 {
				s = t.prefix + s
			}
			row = append(row, s)
		}
		if t.labels {
			row = append(row, labels.FormatLabels(metaOf(r.Object.Raw).Labels))
		}
		rows = append(rows, row)
	}
	t.started = true
	return t.write(rows)
}

func (t *tableWriter) write(rows [][]string) error {
	for _, r := range rows {
		for i, s := range r {
			if i >= len(t.widths) {
				t.widths = append(t.widths, 0)
			}
			t.widths[i] = max(t.widths[i], len([]rune(s)))
		}
	}
	for _, r := range rows {
		var b strings.Builder
		for i, s := range r {
			b.WriteString(s)
			if i < len(r)-1 {
				b.WriteString(strings.Repeat(" ", t.widths[i]-len([]rune(s))+3))
			}
		}
		if _, err := fmt.Fprintln(t.out, b.String()); err != nil {
			return err
		}
	}
	return nil
}

func cell(v any) string {
	switch x := v.(type) {
	case string:
		return strings.NewReplacer("\n", " ", "\x1b", "?").Replace(x)
	case float64:
		return fmt.Sprintf("%.0f", x)
	}
	return fmt.Sprint(v)
}

// metaOf reads the metadata of a row's object.
func metaOf(raw []byte) metav1.PartialObjectMetadata {
	var o metav1.PartialObjectMetadata
	if json.Unmarshal(raw, &o) != nil {
		return metav1.PartialObjectMetadata{}
	}
	return o
}
