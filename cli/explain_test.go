package cli

import (
	"reflect"
	"testing"

	"github.com/dunlin-project/dunlin/controlplane/scheduler"
)

// TestExplainRows: one line for each objection, with who is in the way.
func TestExplainRows(t *testing.T) {
	got := explainRows(&scheduler.NodePlacement{Name: "n", Filters: []scheduler.FilterPlacement{
		{Name: "NodeAffinity", OK: true},
		{Name: "InterPodAffinity", Reason: "zone=z0 has 1 pods of {app=db}, none is wanted", HeldBy: []string{"default/db"}},
		{Name: "NodeResourcesFit", Reason: "memory", Figures: []scheduler.FigurePlacement{
			{Resource: "cpu", Needs: "1", Free: "2", Of: "4"},
			{Resource: "memory", Needs: "300Mi", Free: "210Mi", Of: "430Mi", Short: true, HeldBy: []string{"default/a (120Mi)", "2 others"}}}},
	}})
	want := [][]string{
		{"n", "InterPodAffinity", "zone=z0 has 1 pods of {app=db}, none is wanted; held by default/db"},
		{"n", "NodeResourcesFit", "memory: needs 300Mi, free 210Mi of 430Mi; held by default/a (120Mi), 2 others"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%q", got)
	}
	if got := explainRows(&scheduler.NodePlacement{Name: "n", Fits: true}); !reflect.DeepEqual(got, [][]string{{"n", "-", "fits"}}) {
		t.Errorf("%q", got)
	}
}
