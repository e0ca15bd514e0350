package state

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"path"
	"strings"
	"testing"
)

// banned are packages that a deterministic state machine has no use for.
var banned = map[string]string{
	"math/rand": "random", "math/rand/v2": "random", "crypto/rand": "random", "hash/maphash": "seeded per process",
	"github.com/google/uuid": "random", "os/exec": "outside world", "net": "outside world",
}

// bannedCalls are selectors of allowed packages.
var bannedCalls = map[string]bool{"time.Now": true, "time.Since": true, "time.Until": true, "time.After": true, "time.NewTimer": true, "time.Tick": true}

// TestNoNondeterminism keeps clocks, random sources and map order out of
// this package (design invariant 4).
func TestNoNondeterminism(t *testing.T) {
	fset := token.NewFileSet()
	pkgs, err := parser.ParseDir(fset, ".", func(i fs.FileInfo) bool { return !strings.HasSuffix(i.Name(), "_test.go") }, 0)
	if err != nil {
		t.Fatal(err)
	}
	var files []*ast.File
	for _, f := range pkgs["state"].Files {
		files = append(files, f)
		for _, im := range f.Imports {
			if why, bad := banned[strings.Trim(im.Path.Value, `"`)]; bad {
				t.Errorf("%s imports %s: %s", fset.Position(im.Pos()), im.Path.Value, why)
			}
		}
	}
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
	// What other packages declare stays unknown: no range is over it.
	conf := types.Config{Importer: emptyImporter{}, Error: func(error) {}}
	_, _ = conf.Check("state", fset, files, info)
	ranges := 0
	for _, f := range files {
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.SelectorExpr:
				if id, ok := n.X.(*ast.Ident); ok && bannedCalls[id.Name+"."+n.Sel.Name] {
					t.Errorf("%s: %s.%s", fset.Position(n.Pos()), id.Name, n.Sel.Name)
				}
			case *ast.RangeStmt:
				ranges++
				if typ := info.Types[n.X].Type; typ == nil || typ == types.Typ[types.Invalid] {
					t.Errorf("%s: type of the range unknown", fset.Position(n.Pos()))
				} else if _, isMap := typ.Underlying().(*types.Map); isMap {
					t.Errorf("%s: ranges over a map", fset.Position(n.Pos()))
				}
			}
			return true
		})
	}
	if ranges == 0 {
		t.Error("no range statement was checked")
	}
}

type emptyImporter struct{}

func (emptyImporter) Import(p string) (*types.Package, error) {
	pkg := types.NewPackage(p, path.Base(strings.TrimSuffix(p, "/v2")))
	pkg.MarkComplete()
	return pkg, nil
}
